"""Plots in which somebody sets out, looks for something, or has to get past something.

The notation is that of `plots.py`: a blank line starts the next beat, each line of a beat is one way to tell it,
`[a|b]` is a choice, `{N}` a word of the cast.
"""

from __future__ import annotations

from benchmarks.demo_model.stories.plots import Plot, Theme
from benchmarks.demo_model.stories.plots import plot as _plot

JOURNEYS: tuple[Plot, ...] = (
    _plot(
        "lost_thing",
        Theme.HAPPY | Theme.OBJECT | Theme.FRIEND,
        """
        {N} had a {obj}, and {he} [took it everywhere|loved it more than anything|never went anywhere without it].
        {N}'s favorite thing in the whole world was a {obj}.
        an old friend had once given {him} a {obj}, and {N} [kept it close|looked after it every day].

        one {weather} {time}, the {o} was gone.
        but one {weather} {time}, {N} woke up and [the {o} was gone|could not find the {o}].
        then, one {time} in {season}, {he} lost it.

        {N} looked [everywhere|high and low|in every corner], but [it was not there|{he} could not find it]. {he} [began to cry|sat down and sighed|felt very sad].
        {he} searched all {time}, but there was no {o}. "[where can it be|where did it go|who could have taken it]?" {N} [asked|whispered].

        just then, a {f} [came by|walked past|heard {him}]. "why are you so sad?" {fhe} asked. "I have lost my {o}," said {N}.
        a {f} [stopped beside {him}|came to see what was wrong]. "what are you looking for?" asked {M}. "my {o}," said {N}. "it is gone!"

        "[don't worry|do not be sad]," said {M}. "[we will find it together|I will help you look|four eyes are better than two]."
        "let us look [together|one more time]," {M} said kindly. "[two can see more than one|I am good at finding things]."

        they looked and looked, and at last they found the {o} {hide}.
        together they searched until {M} [shouted|called], "look!" there was the {o}, {hide}.
        after a long time, {M} saw something {hide}. it was the {o}!

        {N} [hugged|thanked] {M}. "thank you," {he} said. "[you are a true friend|I could not have done it alone]."
        "you found it!" cried {N}, and {he} [danced for joy|laughed out loud]. {M} [smiled|laughed too].

        from that day on, {N} and {M} [were best friends|looked after the {o} together|shared everything they had].
        {N} still had the {o}, but now {he} had something even better: a friend.
        """,
    ),
    _plot(
        "far_place",
        Theme.HAPPY | Theme.BRAVE | Theme.JOURNEY,
        """
        {N} had always wanted to see {far}.
        every night, {N} dreamed of {far}.
        more than anything, {N} wished to see {far} [with {his} own eyes|just once].

        "it is too far," everyone said. "[stay here with us|you will get lost]." but {N} [did not listen|had made up {his} mind].
        "[nobody goes there|you are too [small|young|slow] for that]," said the others. {N} only [smiled|packed {his} bag].

        so one {weather} {time}, {he} [set off|left {home_the} behind|began the long journey].
        one {time} in {season}, {N} said goodbye and [set off|started on {his} way].

        before long, {he} came to a {obst}. {N} [was afraid|stopped|did not know what to do]. "[I cannot go back now|one step at a time|there must be a way]," {he} told {himself}.
        on the way there was a {obst}. "[how will I get past this|what now]?" {N} wondered.

        {he} [tried once, and then again, and then a third time|thought for a long time], and at last {he} [got past it|found a way around it].
        slowly and carefully, {he} [found a way through|went on], and soon the {obst} was behind {him}.

        {N} met a {f} on the road, who [gave {him} something to eat|showed {him} the right way]. "[you are almost there|do not give up]," said {M}.
        when {he} was tired, a {f} [let {him} rest|shared a warm meal with {him}]. "[it is not far now|keep going]," {fhe} said.

        at last, {N} reached {far}. it was [more beautiful than any dream|bigger and brighter than {he} had thought].
        and then, one {time2}, there it was: {far}. {N} [could not speak|laughed with joy].

        when {he} came home, everyone wanted to hear the story. "[it was far|it was hard]," said {N}, "[but it was worth every step|and I would go again tomorrow]."
        {N} stayed for a while and then went home, [happy and proud|with a story to tell].
        """,
    ),
    _plot(
        "treasure_map",
        Theme.HAPPY | Theme.OBJECT | Theme.JOURNEY,
        """
        one {weather} {time}, {N} found an old map {hide}. it showed the way to [a treasure|a secret treasure].
        one {time} in {season}, an old map [fell at {N}'s feet|came with the wind]. "[treasure|a treasure map]!" {N} cried.

        {he} [showed it to|ran to show it to] a {f}. "[let us go and find it|we must go at once]," said {M}.
        "I cannot go alone," thought {N}, so {he} asked a {f} to come along. {M} [said yes at once|was happy to go].

        they followed the map to {far}. [the way was long|it took them all day], and there was a {obst} to cross.
        the map led them past a {obst} and on to {far}.

        "[are you afraid|are you tired]?" asked {M}. "[a little|only a little]," said {N}, "[but not with you beside me|but we are almost there]."
        "[what if there is nothing there|what if we get lost]?" asked {N}. "then we will have had [an adventure|a good walk]," said {M}.

        under [a flat stone|an old tree|a heap of sand] they found a box. inside there was no gold, only a {obj}.
        at the end of the path stood a small box. {N} opened it slowly. inside was a {obj}, and nothing more.

        at first, {N} was [disappointed|sad]. then {he} looked at {M} and [smiled|began to laugh]. "the best treasure," {he} said, "was [our day together|finding it with you]."
        "[only a {o}|is that all]?" said {M}, and they both [began to laugh|laughed until they cried]. it had been the best day of the year.

        {N} kept the {o} [forever|all {his} life], to remember that day.
        they took the {o} home, and every time they looked at it, they remembered their adventure.
        """,
    ),
    _plot(
        "storm",
        Theme.HAPPY | Theme.BRAVE | Theme.STORM | Theme.STILL,
        """
        one {time} in {season}, dark clouds [filled the sky|came over {home_the}]. "[a storm is coming|it will be a big one]," said {N}.
        one {weather} {time}, the wind began to [howl|blow]. a great storm was coming.

        the rain [fell hard|poured down], and the thunder [rolled|boomed]. {N} [trembled|was frightened], but {he} stayed where {he} was.
        lightning flashed, and the rain beat down. {N} had never [seen|heard] such a storm.

        then {he} heard a small voice. "help!" it [cried|called]. it was a {f}, [wet and cold|lost in the rain].
        in the middle of the storm, {he} saw a {f}, [shaking with cold|all alone in the rain].

        "[come here|come close to me]," called {N}. "I will [keep you safe|keep you dry]."
        {N} forgot {his} own fear. "[over here|this way]!" {he} shouted. "you can stay with me."

        all night long, they [told each other stories|sang songs to drown out the thunder|held on tight].
        {M} [came close|sat down beside {him}], and together they waited. "[the thunder is only noise|even the longest storm must end]," said {N}.

        in the morning, the sun came out and [a rainbow hung over {home_the}|the whole world was shining].
        by morning, the storm was over. [everything was quiet|birds were singing again].

        "you saved me," said {M}. "you [kept me company|made me brave]," said {N}. "[we saved each other|that is worth more]."
        "thank you," said {M}. "[you are very brave." "I was afraid too|I was so afraid." "so was I]," said {N}, "[but not so much when there were two of us|until you came]."

        after that, {N} was never [quite so afraid of|alone in] a storm again.
        and whenever it rained, {M} came back to visit {him}.
        """,
    ),
    _plot(
        "noise_in_the_night",
        Theme.SCARY | Theme.FUNNY | Theme.BRAVE | Theme.STILL | Theme.NIGHT,
        """
        one dark night, {N} heard a strange noise. [creak|tap, tap, tap|woo, woo], it went.
        late one night, when everything was quiet, {N} [woke up|opened {his} eyes]. something was making a [strange|terrible] noise.

        "[who is there|what is that]?" {he} whispered. nobody answered. {his} heart beat very fast.
        {N} [shivered|began to shake]. "[is it a monster|is it a ghost]?" {he} wondered.

        the noise came closer. [creak|tap, tap, tap|thump, thump]. two [yellow|bright] eyes shone in the dark.
        {he} wanted to [hide|call for help], but then {he} [took a deep breath|held very still] and looked.

        "[please do not hurt me|stay away]!" cried {N}. "[please do not hurt me|don't be afraid]," said a tiny voice.
        "[show yourself|come out]!" {N} called. [slowly|after a moment], something small came out of the dark.

        it was only a {f}. "I am sorry," {fhe} said. "I [was looking for my {o}|lost my way|was hungry]."
        there stood a {f}, who looked [even more frightened|very small]. "I am {M2}," {fhe} said. "[I am lost|I cannot sleep]."

        {N} [began to laugh|laughed until {his} sides hurt]. "I thought you were a monster!" {he} said. "[and I thought you were one|I am afraid of monsters too]," said {M}.
        "[is that all?|you scared me!]" said {N}. then they looked at each other and laughed.

        they [shared a late supper|talked until the sun came up|sat together under the moon]. the night did not seem so dark anymore.
        after that, {N} was not afraid of the dark. when {he} heard a noise, {he} [only said good night to it|thought of {M} and smiled].
        """,
    ),
    _plot(
        "fear",
        Theme.HAPPY | Theme.BRAVE,
        """
        but {N} had a secret: {he} was afraid of {fear}.
        there was one thing that {N} feared, and that was {fear}.
        everyone thought that {N} was afraid of nothing. but {he} was afraid of {fear}.

        whenever {he} thought of it, {he} [hid|ran away|closed {his} eyes]. the others laughed at {him}.
        because of this, {he} [stayed at home|never went out with the others], and {he} was often lonely.

        one {weather} {time}, {N} heard a cry. a {f} [was in trouble|needed help], and there was nobody else to help.
        then, one {time} in {season}, a {f} came running. "[please help me|come quickly]!" {fhe} cried. "my [little brother|little sister|best friend] is stuck {hide}."

        to get there, {N} had to face {fear}. {his} knees shook. "[I cannot do it|I am too scared]," {he} thought. "[but I must try|but somebody has to]."
        {N} looked ahead and saw {fear}. {he} took one step, and then another. "[one step at a time|I can do this]," {he} said softly.

        and before {he} knew it, {he} had done it. everyone was safe.
        {he} counted to three, and then {he} went. it was [not so bad|over in a moment], and {he} was there in time to help.

        "you are the bravest {k} I know," said {M}. "[I was so scared|my heart is still beating fast]," said {N}. "[that is what brave means|being brave means going anyway]," {M} answered.
        "thank you!" said {M}. "were you not afraid?" {N} smiled. "[I was|very much]," {he} said, "but [you needed me|helping was more important]."

        since then, {N} [is still a little afraid sometimes|has not been so afraid], but {he} [knows what to do|goes anyway].
        that night, {N} [slept very well|went to bed happy]. {he} had learned that even the brave are afraid.
        """,
        names=("fear",),
        choices=tuple(
            (fear,)
            for fear in (
                "the dark",
                "high places",
                "deep water",
                "loud noises",
                "thunder",
                "strangers",
                "big waves",
                "shadows",
                "spiders",
                "fire",
                "the cold",
            )
        ),
    ),
    _plot(
        "race",
        Theme.HAPPY | Theme.CONTEST,
        """
        every {season}, there was a great {contest} [near {home_the}|for everyone]. this year, {N} wanted to [win|take part].
        one {weather} {time}, {N} heard about a {contest}. "[I am going to win|I want to try]," {he} said.

        a {f} [laughed|laughed loudly]. "[you will never win|you]?" said {M}. "[I win every year|I am much better than you]."
        {N} [practiced|worked] every day. but a {f} was [very good too|the best of all], and {fhe} [said so to everyone|never lost].

        on the day of the {contest}, [everyone came to watch|the crowd was big]. {N} was [nervous|excited]. "[just do your best|here I go]," {he} told {himself}.
        the big day came. "[ready|are you ready]?" a voice called. "[go|begin]!"

        at first, {M} was [ahead|winning]. but then {M} [slipped and fell|hurt {fhis} foot|got stuck]. "[help|ouch]!" {fhe} cried.
        {N} was [winning|almost first] when {he} saw that {M} was in trouble.

        {N} could have [won|gone on alone]. but {he} [stopped|turned back] and [helped {M} up|gave {M} a hand]. "[why did you stop|why did you come back]?" asked {M}. "[because you needed help|some things matter more]," said {N}.
        {N} did not think twice. {he} [turned around|stopped at once]. "[lean on me|take my hand]," {he} said, and they finished together.

        {N} did not win the {contest}. but {he} got {prize}, [for the kindest heart|because everyone had seen what {he} did].
        they came in last, [side by side|laughing], and the crowd [cheered for them|clapped louder than ever]. they shared {prize}.

        "[thank you for helping me|I will never forget this]," said {M}. "[let us be friends," said {N}, and so they were|will you be my friend?" asked {N}, and so they became friends].
        from then on, {N} and {M} [practiced together|were always on the same team].
        """,
        names=("contest", "prize"),
        choices=(
            ("race", "a golden medal"),
            ("singing contest", "a silver cup"),
            ("dancing contest", "a blue ribbon"),
            ("swimming race", "a shiny medal"),
            ("baking contest", "a golden spoon"),
            ("kite contest", "a red ribbon"),
            ("jumping contest", "a small silver cup"),
            ("treasure hunt", "a bag of sweets"),
        ),
    ),
    _plot(
        "two_friends_way",
        Theme.HAPPY | Theme.PAIR | Theme.JOURNEY,
        """
        one {weather} {time}, {M} said, "[let us go to {far}|I want to see {far}]." "[what a good idea|I will come with you]," said {N}.
        one {time} in {season}, they [decided to go|set off together] to {far}.

        {N} [carried|brought] a {obj}. {M} [laughed|asked], "[what is that for|why do you need that]?" "you never know," said {N}.
        they took only [a little bread|some food] and {N}'s {obj}.

        after a while, they came to a {obst}. "[we have to turn back|it is too hard]," said {M}. "[no|wait]," said {N}. "[I have an idea|let us think first]."
        halfway there, they found a {obst} in their way. {M} [sat down and sighed|wanted to go home].

        {N} took out the {o}, and with its help they [got past it|found a way through].
        "the {o}!" said {N}. and indeed, it was just what they needed. soon they were on the other side.

        "[I will never laugh at your {o} again|you were right]," said {M}. {N} only smiled.
        {M} [was amazed|clapped]. "you think of everything," {fhe} said. "[and you keep me going|and you make me laugh]," said {N}.

        at last they reached {far}. they sat [side by side|close together] and [watched the sun go down|did not need to say anything].
        when they came to {far}, it was even better than they had hoped. they [played|sang] until [the stars came out|it was time to go home].

        {the_two} have been on many trips since then, but they always say the first was the best.
        "the best thing about a journey," said {M}, "is [the friend beside you|who you go with]." and {N} agreed.
        """,
    ),
)
