"""Plots about tricks, mistakes and clever ideas; the notation is that of `plots.py`."""

from __future__ import annotations

from benchmarks.demo_model.stories.plots import Plot, Theme
from benchmarks.demo_model.stories.plots import plot as _plot

LAUGHTER: tuple[Plot, ...] = (
    _plot(
        "trickster",
        Theme.FUNNY | Theme.TRICK | Theme.STILL,
        """
        a {f} liked to play tricks on everyone. "[today it is your turn|I will trick {N} today]," {fhe} [said|giggled].
        one {weather} {time}, a {f} wanted to play a trick on {N}.

        "{call}! {call}!" cried {M}. "[the sky is falling down|the moon has fallen into the well|there is a giant behind you]!"
        "[have you heard|did you know]?" said {M}. "[today is upside-down day|a king is coming to see you|all the cheese in the world is gone]!"

        {N} [was not a fool|saw {M} smile], but {he} said nothing. "[how terrible|oh dear]!" {he} said instead. "[what shall we do?|we must act at once!]"
        {N} knew it was a trick, and {he} had a better one. "[I know|yes, I heard it too]," {he} said.

        "[quick, stand on one leg|quick, put a bucket on your head|quick, sing as loud as you can]," said {N}. "[that is the only thing that helps|it is the only way to be safe]!"
        "you must [hop three times|turn around ten times|walk backward all day] at once," {he} said, "or [your nose will turn green|your ears will grow|something terrible will happen]!"

        {M} [did it at once|believed every word], and everyone [came to look|stopped and stared].
        and {M}, who was now [afraid|worried] {fhimself}, did just that.

        then {N} [winked|could not hold it any longer] and began to laugh. {M} [turned red|stopped], and then {fhe} laughed too.
        after a while, {M} looked at {N}. "[you tricked me!|was that a trick?]" {fhe} said. "[who, me|you started it]," said {N}, and they both laughed.

        "[you are too clever for me|I will never trick you again]," said {M}. "[what a pity|oh, please do]," said {N}. "it was [so much fun|the best joke of the week]."
        from then on, they played tricks together, and nobody around was safe.
        """,
    ),
    _plot(
        "silly_mistake",
        Theme.FUNNY | Theme.OBJECT,
        """
        one {weather} {time}, {N} could not find {his} {obj}. {he} looked [under the bed|behind the door], but it was not there.
        "where is my {o}?" cried {N}. {he} had lost {his} {obj}, and {he} needed it [right away|that very day].

        {he} asked a {f}, "have you seen my {o}?" {M} [looked at {him}|opened {fhis} mouth] and began to [grin|giggle]. "[maybe|perhaps I have]," {fhe} said.
        {N} met a {f}. "[help me|please help me]! I have lost my {o}," {he} said. {M} [tried not to laugh|bit {fhis} lip].

        "is it [far away|in the garden]?" asked {N}. "[no, very near|much nearer]," said {M}. "is it [under|behind] me?" "[not quite|higher]," said {M}.
        "[a thief must have taken it|maybe a bird stole it]!" said {N}. "[I do not think so|oh no]," said {M}.

        {N} [ran up and down|turned around and around] until {he} was dizzy. {M} laughed so hard that {fhe} [fell over|had to sit down].
        "[why are you laughing|this is not funny]!" said {N}. "[I am sorry|but it is]," said {M}, and {fhe} laughed even more.

        "{N}," said {M} at last, "[touch the top of your head.|what is that on your head?]" and there it was.
        then {N} [walked past a window|looked into a puddle] and saw it. the {o} was sitting on top of {his} own head!

        {N} [turned as red as a tomato|did not know where to look]. then {he} laughed louder than anyone.
        "oh," said {N}. "[I put it there so I would not lose it|well, at least it was safe]!" and they laughed about it all week.
        """,
    ),
    _plot(
        "hiccups",
        Theme.FUNNY | Theme.STILL,
        """
        one {time}, {N} [woke up with|had] the hiccups. hic! [everything shook|the birds flew away]. hic!
        hic! "[oh no|what was that]?" said {N}. hic! {he} had the hiccups, and they would not stop.

        "you must [drink ten cups of water|hold your breath]," said a {f}. {N} [did so|tried it]. it was quiet for a moment. hic!
        a {f} came to help. "[stand on your head|count backward from ten]," {fhe} said. {N} tried it. hic!

        "[think of a blue cow|say your name backward]," said {M}. {N} [thought hard|tried]. hic! "[it does not work|it is no use]," {he} said. hic!
        "[try to sing|spin around]," said {M}. so {N} did. [la, la, hic|la, hic, la]! it was [a very funny song|terrible].

        soon everybody had come to look. each had another idea, and none of them helped.
        "[I will have hiccups forever|I cannot stop]," cried {N}. hic!

        suddenly, {M} [jumped up|popped out from behind] and shouted, "boo!" {N} [jumped|jumped high into the air], and then it was quiet. very quiet. the hiccups were gone!
        then {M} [tickled {him}|made a funny face], and {N} laughed so hard that {he} forgot to hiccup.

        "thank you!" said {N}. "[you are welcome|it was nothing]," said {M}. "hic!"
        "[at last|finally]," said {N}, "it is over." everybody was silent. then, from the back, came a small sound. hic! it was {M}.
        """,
    ),
    _plot(
        "big_cake",
        Theme.FUNNY | Theme.CONTEST,
        """
        {N} wanted to make the biggest {food} in the world. "[it will be as big as a house|everyone will talk about it]," {he} said.
        one {weather} {time}, {N} decided to make {food} [for everyone|for a party]. "[how hard can it be?|it cannot be so hard,]" {he} said.

        {he} [did not read the book|had no idea how], so {he} took a bit of everything: [flour, honey, and a whole pumpkin|ten eggs, a bag of sugar, and some soap].
        a {f} came to help. "how much sugar?" asked {M}. "[all of it|ten bags]!" said {N}.

        the {food} began to grow. it grew [and grew|bigger and bigger]. it filled [the whole room|the pot], and then it [came out of the window|ran out of the door].
        bubble, bubble, [pop|boom]! the {food} flew [everywhere|in all directions]. there was {food} on the walls and {food} on the roof.

        "[stop|help]!" cried {N}, but it [did not stop|was too late]. soon {N} was [stuck|covered in {food}] up to {his} ears.
        {N} looked at the mess, and the mess dripped down on {N}.

        "[there is only one thing to do|I have an idea]," said {N}. "[call everyone|bring a spoon]!" and everybody came with [a spoon|a plate].
        soon all the neighbors stood there with big eyes. then the smallest one [tasted it|took a bite]. "[it is good|yummy]!" {fhe2} said.

        they ate until [there was nothing left|they could not move]. it was not {a_perfect} {food}, but it was [the funniest day of the year|the best party ever].
        "next time," said {N}, licking the last of it from {his} nose, "I will make [a very small one|soup]."
        """,
        names=("food", "fhe2", "a_perfect"),
        choices=tuple(
            (food, pronoun, "a perfect")
            for food in ("pudding", "cake", "pancake", "pie", "bread", "soup")
            for pronoun in ("he", "she")
        ),
    ),
    _plot(
        "clever_escape",
        Theme.HAPPY | Theme.TRICK | Theme.BRAVE,
        """
        one {weather} {time}, {N} was [on {his} way home|looking for food] when a huge {enemy} [jumped out|stood before {him}]. "[I am going to eat you|you look tasty]!" it [roared|said].
        a hungry {enemy} lived not far away, and one {time} it caught {N}. "[now you are my dinner|what a fine supper you will make]," it said.

        {N} was frightened, but {he} [thought quickly|kept calm]. "[wait|please wait]," {he} said. "[I am much too thin|I taste terrible]."
        {N}'s heart beat fast. but {he} smiled and said, "[how lucky|what an honor]! may I ask you something first?"

        "I know where there is [a much bigger dinner|a whole mountain of meat]," {he} said. "[follow me|let me show you]."
        "[everyone says that you are strong|they say you are the greatest {enemy} of all]," said {N}, "but I do not believe [you can jump into that barrel|you can fit into that small box]."

        the {enemy} [licked its lips|laughed]. "[ha|very well]!" it said, and it [did not think at all|went ahead].
        now, the {enemy} was very [greedy|proud], and not very clever. it did as {N} said.

        before it knew what had happened, the {enemy} was stuck. "[help|let me out]!" it [roared|cried]. {N} only smiled.
        bang! in a moment {N} had trapped it. "[let me out|please let me go]!" cried the {enemy}.

        "only if you promise never to [eat anyone|frighten anyone] again," said {N}. "[I promise|I promise, I promise]," said the {enemy} in a small voice.
        {N} let the {enemy} go at last, and it ran away as fast as it could.

        when the others heard of it, they [cheered|carried {N} home]. "[you have to be clever, not big|a quick mind is better than sharp teeth]," {he} said.
        the {enemy} was never seen again. and {N}? {he} [ate {his} own dinner in peace|slept very well that night].
        """,
    ),
    _plot(
        "new_idea",
        Theme.HAPPY | Theme.STILL,
        """
        that year, there was a problem {home_in}: {problem}. nobody knew what to do.
        one {season}, something was wrong. {problem}, and everyone was [sad|worried].

        "[we can do nothing|it has always been like this]," the others said. but {N} [was not so sure|wanted to help]. {he} [thought all night|sat down to think].
        everybody talked, and everybody [complained|shouted]. only {N} was quiet. {he} was thinking.

        in the morning, {he} had an idea. "what if we {idea}?" {he} asked. "[that will never work|what a silly idea]," said a {f}.
        "I know," {he} said at last. "we could {idea}." everyone [laughed|shook their heads]. only a {f} [listened|nodded]. "[let us try|why not]?" said {M}.

        {N} did not give up. {he} [began|started] alone. after a while, {M} [came to help|joined {him}], and then [another, and another|all the others].
        and so they began. it was hard work, and [the first time, it went wrong|twice they had to start again].

        and it worked! soon, {result}.
        after seven days, it was done. {result}, and everyone [cheered|danced].

        "[I was wrong|you were right], {call}," said {M}. "[it was a good idea|I am glad I tried]." {N} smiled. "[we did it together|I could not have done it without you]," {he} said.
        today, if you come to visit, they will tell you about [the idea|that day]. and {N}? {he} is already thinking about [the next one|something new].
        """,
        names=("problem", "idea", "result"),
        choices=(
            ("there was no water", "dig a deep well", "there was clear, cold water for everyone"),
            ("it was always dark", "hang lanterns everywhere", "a hundred little lights were shining"),
            ("nobody ever laughed", "have a party with music", "you could hear laughter from far away"),
            ("there was nothing to eat", "plant a garden for everyone", "there were beans and corn and sweet berries"),
            ("everything was grey", "paint everything in bright colors", "everything was red and yellow and blue"),
            ("everyone was lonely", "eat together once a week", "everyone knew everyone by name"),
            ("the roof of the school was broken", "build a new one together", "the children were warm and dry again"),
            ("the old bridge had fallen down", "build a new bridge", "everybody could cross the river again"),
        ),
    ),
    _plot(
        "hero_learns",
        Theme.HAPPY | Theme.WISH,
        """
        {N} wanted to learn how to {skill}. "[you will never learn that|that is not for you]," said the others.
        more than anything, {N} wanted to {skill}. but {he} did not know how.

        {he} tried on {day1}, and [it went wrong|{he} fell down]. {he} tried on {day2}, and it was even worse.
        the first time, {he} [failed|gave up after a minute]. the second time, [everyone laughed|it was no better].

        "[maybe they are right|I should give up]," {N} thought, and {he} sat down [sadly|with tears in {his} eyes].
        {N} was ready to give up. "[I will never be able to do it|it is too hard for me]," {he} said.

        a {f} had watched {him}. "do you know how many times I tried before I could {skill}?" {fhe} asked. "[ten|two]?" {N} guessed. "[a hundred|a thousand]," said {M}.
        "[I can teach you|let me show you]," said a {f}. "[start slowly|first you must be patient]. [a little every day|again and again] is the secret."

        so {N} [practiced every day|tried again the next day], [in sun and in rain|from morning until night]. {M} [watched|cheered for {him}].
        day after day, {N} [came back|practiced], and {M} helped {him}.

        and then, one {weather} {time}, it happened. {N} could {skill}! {he} [could hardly believe it|laughed with joy].
        then one {time}, nobody laughed anymore. they stood with open mouths, because {N} could {skill} [better than anyone|beautifully].

        "how did you do it?" they asked. "[I failed many times," said {N}, "and then I did not|slowly," said {N}, "and with a good friend]."
        "you see?" said {M}. "[it was in you all the time|you only had to keep trying]."
        """,
        names=("skill", "day1", "day2"),
        choices=tuple(
            (skill, first, second)
            for skill in ("dance", "sing", "fly", "read", "whistle", "paint", "juggle", "play the violin", "do magic")
            for first, second in (("Monday", "Tuesday"), ("Friday", "Sunday"))
        ),
    ),
    _plot(
        "small_hero",
        Theme.FUNNY | Theme.PAIR | Theme.TRICK,
        """
        one {weather} {time}, {M} said, "I bet that you cannot [stay quiet for one hour|stand still until noon]." "[of course I can|what do I get]?" said {N}. "[my {obj}|you can have my {obj}]," said {M}.
        one {time} in {season}, {they_two} made a bet. whoever spoke first would lose a {obj}.

        it was quiet. [very quiet|so quiet that they heard the grass grow]. a fly sat down on {N}'s nose. {he} [did not move|said nothing].
        ten minutes went by. {M} made funny faces. {N} [bit {his} lip|looked the other way].

        then it began to rain. [both of them got wet|the rain ran down their necks], but neither said a word.
        then somebody came and asked, "[excuse me, what time is it|which way is it to {far}]?" neither of them answered. "[how rude|how strange]," said the stranger, and went away.

        at last {M} [saw something|looked up]. "[look, a rainbow|look out, a bee]!" {fhe} cried. "ha!" shouted {N}. "[you lost|I win]!"
        suddenly {N} [sneezed|had to laugh]. "[that does not count|that was not a word]!" {he} said. "[no, but that was|ha]!" cried {M}.

        and then they laughed so loudly that [the birds flew away|everyone came to look].
        "[let us say we both won|it is too hard to be quiet with you]," said {M}, and so they shared the {o}.
        """,
    ),
)
