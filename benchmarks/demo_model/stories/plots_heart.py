"""Plots about friendship, wishes, gifts, secrets, sorrow and sleep; the notation is that of `plots.py`."""

from __future__ import annotations

from benchmarks.demo_model.stories.plots import Plot, Theme
from benchmarks.demo_model.stories.plots import plot as _plot

HEARTS: tuple[Plot, ...] = (
    _plot(
        "lonely",
        Theme.HAPPY | Theme.FRIEND | Theme.STILL,
        """
        {N} had [everything {he} needed|a good life], but {he} did not have a friend.
        but {N} was lonely. [nobody ever came to visit|there was nobody to talk to].
        all day long, {N} [watched the others play|waited for somebody to come]. {he} wished for a friend.

        one {weather} {time}, a {f} [came by|stopped to rest nearby]. "[hello|good {time}]," said {N} shyly. "[hello|good {time} to you]," said {M}.
        then, one {time} in {season}, {he} heard somebody [crying|singing|humming]. it was a {f}.

        "[would you like to stay for a while|will you sit with me]?" asked {N}. "[I would like that very much|yes, please]," said {M}. "[I have no friends here|I am new here]."
        "why are you here all alone?" asked {N}. "[nobody wants to play with me|I am far from home]," said {M}. "[I know how that feels|then we are two]," said {N}.

        they talked about {topic} until [the sun went down|the stars came out].
        {N} told {M} about {topic}, and {M} [laughed|listened to every word].

        the next day, {M} came back, and the day after that too. [they always had something to talk about|they were never bored].
        "[may I come again tomorrow|can I come back]?" asked {M}. "[please do|every day, if you like]!" said {N}.

        and {N} [was never lonely again|knew that {he} had a friend at last].
        now, when {N} wakes up, {he} [smiles|is happy], because {he} has a friend.
        "[do you know|you know]," said {N} one {time2}, "[I used to be lonely|I once wished for a friend]." "[and now|and]?" asked {M}. "now I have [you|the best one in the world]."
        """,
        names=("topic",),
        choices=(
            ("the moon",),
            ("faraway lands",),
            ("their dreams",),
            ("the old days",),
            ("the sea",),
            ("the stars",),
            ("good food",),
            ("the winter",),
            ("everything and nothing",),
        ),
    ),
    _plot(
        "farewell",
        Theme.SAD | Theme.FRIEND | Theme.STILL,
        """
        {N}'s best friend was a {f}. they [met every day|did everything together|told each other all their secrets].
        every {time}, {N} [met|talked with] a {f}, {his} [best|dearest] friend.

        but one {weather} {time2}, {M} came with sad news. "I have to go away," {fhe} said. "[my family is moving|winter is coming|my home is far from here]."
        then, one {time2} in {season}, {M} was very quiet. "what is wrong?" asked {N}. "[I must leave tomorrow|I am going far away]," said {M}.

        {N} did not know what to say. a tear [rolled down|fell to the ground]. "[will you come back|will I see you again]?" {he} asked. "[I do not know|I hope so]," said {M}.
        "please stay," said {N}. "[I wish I could|I cannot]," {M} whispered, and they both began to cry.

        before {fhe} left, {M} gave {him} a {obj}. "[think of me when you see it|so that you will not forget me]," {fhe} said.
        {N} gave {M} a {obj}. "[take it with you|so you will remember me]," {he} said. {M} [held it close|could not speak].

        in the morning, {M} [was gone|went away]. {home_the} [felt empty|was very quiet].
        {N} watched until {M} was [only a small dot|out of sight]. then it was very quiet.

        many days went by. {N} still [missed {M}|felt sad], but [the memories were warm|when {he} thought of the good times, {he} smiled].
        {N} still [looks down the road|waits] some evenings. "[wherever you are|my friend]," {he} says softly, "[I hope you are happy|good night]."
        it hurt for a long time. but {N} knew that [a friend far away is still a friend|it hurt because it had been so good].
        """,
    ),
    _plot(
        "last_leaf",
        Theme.SAD | Theme.STILL | Theme.FRIEND,
        """
        {N} loved a small {plant} that grew [nearby|close to {him}]. {he} [watched it every day|talked to it every {time}].
        beside {him} grew a little {plant}. it was {N}'s [only friend|greatest joy].

        all summer long, the {plant} [was bright and strong|grew tall]. "[you are beautiful|I am glad you are here]," {N} told it.
        "[grow well|good {time}], little {plant}," {he} said each day.

        but when {season2} came, the {plant} grew [pale|weak]. one petal fell, and then another.
        then the cold came. the little {plant} [bent its head|lost its color]. "[please do not go|stay with me]," said {N}.

        "[do not be sad|I must sleep now]," the {plant} whispered. "[everything has its time|I was happy here with you]."
        {N} [kept the wind away|stayed beside it all night], but in the morning the {plant} was gone.

        {N} cried for [a long time|many days]. [nothing was the same|the world was grey and quiet].
        {N} was very sad. [the place where the {plant} had been was empty|{he} did not want to talk to anyone].

        but in spring, {N} saw something green. [in the same place|out of the dark earth], a tiny new {plant} was growing. {he} [smiled through {his} tears|remembered, and was glad].
        one day the snow melted, and there, in the same place, were three small leaves. "[so you left something for me|hello, little one]," {N} whispered.
        """,
        names=("plant", "season2"),
        choices=(
            ("rose", "autumn"),
            ("flower", "winter"),
            ("daisy", "autumn"),
            ("sunflower", "winter"),
            ("tulip", "autumn"),
            ("violet", "winter"),
        ),
    ),
    _plot(
        "lost_forever",
        Theme.SAD | Theme.OBJECT,
        """
        {N} had a {obj} that [once belonged to {his} mother|{his} grandfather had made].
        the {obj} was the only thing {N} had from {his} [mother|grandmother].

        one {weather} {time}, {he} [took it along|carried it] to {far}. on the way, {he} [slipped|fell], and the {o} was [lost|gone].
        but one {time} in {season}, there was [a flood|a fire|a storm], and the {o} was lost.

        {N} looked for it for [three days|seven days and nights]. {he} asked everyone, but nobody had seen the {o}.
        "[have you seen my {o}|has anyone found my {o}]?" {he} asked everyone {he} met. but they all shook their heads.

        in the end, {he} had to go home without it. {N} [sat in the dark and cried|did not eat, and did not sleep].
        "it is gone," {he} said at last, and {his} heart was heavy.

        then a {f} came and sat down beside {him}. {fhe} [did not say anything|only stayed]. [that helped a little|it was good not to be alone].
        "tell me about it," said a {f}. so {N} told {M} about the {o} and [who had given it to {him}|all the years {he} had kept it].

        "[you still have the story|nobody can take away what you remember]," said {M} softly. {N} [nodded|wiped {his} eyes]. it was true.
        the {o} was never found. but each year, on that day, {N} tells the story of it, and for a moment [it is there again|{he} is not so sad].
        """,
    ),
    _plot(
        "gift",
        Theme.HAPPY | Theme.GIFT | Theme.FRIEND | Theme.OBJECT,
        """
        {N} knew a {f}, and the next day was {M}'s birthday. {he} wanted to give {fhim} something [special|wonderful].
        {N}'s best friend was a {f}. [tomorrow was {M}'s birthday|soon it would be {M}'s birthday], and {N} had no present.

        {he} [looked in every shop|thought and thought], but everything was too [big|small|expensive]. "[what can I give|what should I do]?" {he} wondered.
        {N} had [no money|only one coin]. "[what would make {M} happy|what can I give]?" {he} asked {himself}.

        then {he} had an idea. {he} would make a {obj} [all by {himself}|with {his} own hands].
        at last {N} decided to make a {obj}. [it took all night|{he} worked until midnight].

        it was not perfect. [one side was crooked|the color was a little strange], and {N} was worried. "[what if {fhe} does not like it|it is not very good]," {he} thought.
        when it was done, the {o} looked a bit [funny|crooked]. {N} almost [threw it away|stayed at home].

        on the birthday, {M} opened the box and was silent. then {fhe} [smiled from ear to ear|began to cry for joy].
        the next day, {he} gave it to {M}. "[did you make this|is this for me]?" {fhe} asked. "[yes|I made it for you]," {N} said quietly.

        "it is the [best present|most beautiful {o}] I have ever had," said {M}, "because [you made it for me|it comes from you]."
        "[nobody has ever made something for me|I love it]!" said {M}, and {fhe} hugged {N} [tightly|for a long time].

        and the {o} [has a place of honor to this day|was never far from {M} after that].
        {N} went home that night with a warm feeling. giving, {he} found, was [even better than getting|the best part].
        """,
    ),
    _plot(
        "sharing",
        Theme.HAPPY | Theme.SHARING | Theme.STILL,
        """
        {N} had more {food} than anyone else. {he} [never gave any away|kept it all for {himself}].
        one {season}, {N} had a great heap of {food}. "[it is all mine|I will not share]," {he} said.

        one {weather} {time}, a {f} came by. "[I am so hungry|I have not eaten for two days]," {fhe} said. "[may I have a little|could you share some {food}]?"
        one {time}, a {f} stopped beside {him}. "please," {fhe} said, "[do you have something to eat|can you spare a little {food}]?"

        "no," said {N}. "[I need it myself|there is not enough]." {M} [went away sadly|hung {fhis} head and left].
        "[go away|it is mine]," said {N}. {M} looked at {him} with sad eyes and went away.

        but that night {N} could not sleep. the {food} did not [taste good|make {him} happy]. {he} kept thinking of {M}.
        {N} sat alone with all {his} {food}. [it was very quiet|nobody laughed, nobody sang]. suddenly, {he} felt ashamed.

        in the morning, {he} [called after|went to find] {M}. "[I am sorry|I was wrong]," {he} said. "[please, have as much as you like|let us eat together]."
        the next day, {N} found {M} and gave {fhim} half of everything. "[forgive me|I was selfish]," {he} said.

        they ate together, and the {food} had never tasted so good. [soon the others came too|everyone was invited].
        {M} smiled. "[thank you|let us have a feast]," {fhe} said, and they [laughed and ate until it was dark|invited everyone around].

        {N} had less {food} now, but [a lot more friends|much more joy].
        since that day, {N} always keeps [a place at the table|a little {food}] for a hungry stranger.
        """,
        names=("food",),
        choices=tuple(
            (food,) for food in ("honey", "bread", "fruit", "cake", "jam", "corn", "cheese", "chocolate", "rice")
        ),
    ),
    _plot(
        "secret",
        Theme.HAPPY | Theme.SECRET | Theme.STILL,
        """
        {N} had a secret. every night, when [everyone was asleep|the moon was up], {he} {did}.
        nobody knew it, but at night {N} {did}. it was {his} secret.

        {he} never told anyone, because {he} thought that [they would laugh|nobody would understand].
        "[if they find out|if anybody knew], they will laugh at me," {he} thought.

        but one {weather} evening, a {f} [saw {him}|was watching]. "so that is what you do!" said {M}.
        one night, a {f} could not sleep, and {fhe} [came closer|heard something]. {fhe} saw everything.

        {N} [turned red|wanted to run away]. "[please do not tell|please keep my secret]," {he} begged. "[but it is wonderful,|but why?]" said {M}.
        "oh no!" cried {N}. "[now you will laugh|now you know]." but {M} did not laugh. "[that was beautiful|I think it is wonderful]," {fhe} said.

        "[everyone should see this|you should show the others]," said {M}. it took [a long time|three days] until {N} said yes.
        "[will you show me how|can you teach me]?" asked {M}. and so, from then on, there were two of them.

        when the others [saw it|found out], nobody laughed. they [clapped|cheered], and some of them had tears in their eyes.
        one evening, {N} did it in front of everyone. {he} was so nervous. but at the end, they all [cheered|called for more].

        since that night, {N} has no secret anymore, [but many friends|and is happier than ever].
        "I should have [shown you long ago|told you sooner]," said {N}. "[it is never too late|better late than never]," said {M}.
        """,
        names=("did",),
        choices=(
            ("sang to the moon",),
            ("wrote poems",),
            ("danced all alone",),
            ("painted little pictures",),
            ("told stories to the stars",),
            ("played a tiny flute",),
            ("practiced magic tricks",),
            ("made up funny songs",),
        ),
    ),
    _plot(
        "wish",
        Theme.HAPPY | Theme.WISH | Theme.NIGHT | Theme.STILL,
        """
        one clear night, {N} saw a falling star. "I wish {wish}," {he} [whispered|said at once].
        "I wish {wish}," {N} said every night to the [stars|moon].

        [suddenly there was a bright light|the air began to glow], and a {f} stood there. "[I heard your wish|your wish is granted]," said {M}. "[but be careful|but it will last only one day]."
        a {f} heard {him}. "[I can help you|I know some magic]," said {M}. "[close your eyes|hold still]."

        and when {N} [opened {his} eyes|woke up], it had come true. [at first, it was wonderful|{he} could not believe it].
        there was a flash, and it was so! {N} [laughed|shouted] with joy.

        but soon {N} noticed that {problem}. {he} [was not happy|felt strange].
        all morning, {he} enjoyed it. but by noon, {problem}, and {N} [sighed|grew sad].

        "[I want to be myself again|I take it back]," {he} said at last. "[please|please, can you undo it]?" {M} [smiled|nodded]. "[I thought so|of course]," {fhe} said.
        "how is your wish?" asked {M} that evening. "[I miss how it was|I want my old life back]," said {N}. {M} [clapped twice|laughed], and everything was as before.

        {N} [looked around|took a deep breath]. everything was just right [the way it was|as it had always been].
        "now I know," said {N}, "that I [am happy as I am|have all I need]."
        since then, when {N} sees a falling star, {he} only says, "[thank you|I have everything I want]."
        """,
        names=("wish", "problem"),
        choices=(
            ("I were bigger than everyone else", "nobody could hear what {he} said"),
            ("I were very small", "everyone forgot that {he} was there"),
            ("I were rich", "{he} had nobody to share the gold with"),
            ("I were a king", "everyone bowed and nobody played with {him}"),
            ("it were always summer", "the flowers were thirsty"),
            ("I could have cake every day", "{he} never wanted to see cake again"),
            ("nobody would bother me", "it was far too quiet"),
            ("I could be invisible", "nobody saw {him} and nobody said hello"),
            ("I could talk to everyone in the world", "there were too many voices at once"),
        ),
    ),
    _plot(
        "cannot_sleep",
        Theme.NIGHT | Theme.HAPPY | Theme.STILL,
        """
        one {weather} evening, {N} could not sleep. {he} [turned this way and that way|counted to one hundred], but it did not help.
        it was late, and everyone was asleep but {N}. "[why can I not sleep|I am wide awake]," {he} said.

        {he} asked a {f}, "[how do you fall asleep|what do you do when you cannot sleep]?" "I [count the stars|listen to the wind]," said {M}.
        a {f} [heard {him} sigh|was awake too]. "[I can help you|close your eyes]," said {M}. "think of [the sea|something soft]."

        {N} tried it. [one, two, three|one by one, the minutes went by]. but {he} was still awake.
        that was nice, but it did not make {him} sleepy.

        "[then tell me about your day|what was the best thing today]," said {M} [softly|in a low voice]. so {N} told {fhim} about [the morning|the sun], and [the clouds|the wind], and [the good smell of bread|all the small things].
        then {M} began to sing, very quietly, an old song about [the moon|a little boat|the snow].

        the words grew slower and slower. {N}'s eyes [grew heavy|began to close].
        {N} yawned. [once|a small yawn], and then [again|a big one].

        "good night, {fcall}," {he} [whispered|mumbled]. "good night, {call}," said {M}. but {N} was already asleep.
        and before [long|the moon was high], {N} was fast asleep. the moon [shone softly|smiled down] on them both.
        """,
    ),
    _plot(
        "quarrel",
        Theme.HAPPY | Theme.PAIR | Theme.FRIEND | Theme.SHARING,
        """
        one {weather} {time}, they found a {obj}. "[I saw it first|it is mine]!" said {N}. "[no, I did|no, it is mine]!" said {M}.
        but one {time} in {season}, they had a quarrel. it was all about a {obj}. "[it belongs to me|I found it first]," said {M}. "[that is not true|no, it is mine]," said {N}.

        they pulled and shouted, and then [crack|rip], the {o} broke in two.
        {N} [turned around|stamped {his} foot] and went home. {M} went the other way. the {o} stayed behind, and nobody had it.

        for three days, they did not [speak|see each other]. the days were [long|empty].
        {N} sat alone and [looked at the wall|thought about {M}]. [nothing was fun anymore|it was so quiet without {M}].

        at last {N} [could not bear it|made up {his} mind] and went to see {M}. halfway there, {he} met {M}, who was coming to see {him}.
        on the fourth day, somebody knocked. it was {M}. "[I miss you|I am sorry]," {fhe} said.

        "I am sorry," they both said at the same time, and then they had to laugh.
        "[a friend is worth more than a {o}|I was silly]," said {N}. "[so was I|I think so too]," said {M}.

        they [mended|cleaned] the {o} together. now it belongs to both of them.
        after that, {the_two} shared the {o}, and [never quarreled about it again|everything else too].
        """,
    ),
    _plot(
        "promise",
        Theme.HAPPY | Theme.PAIR | Theme.FRIEND | Theme.NIGHT,
        """
        they promised each other to [watch the first snow|see the first stars of {season}|meet every full moon] together, every year.
        "[whatever happens|one day we will be old]," said {M}, "we will always [meet here|be friends]." "I promise," said {N}.

        but one year, {M} did not come. {N} waited [until midnight|all night]. [{he} began to worry|something was wrong].
        then, one {time} in {season}, {M} [fell ill|hurt {fhis} foot] and could not come.

        so {N} [put on a warm scarf|took a lantern] and went to look for {fhim}. the way was [long|dark], and there was a {obst}, but {he} did not stop.
        when {N} heard of it, {he} set off at once. {he} had to get past a {obst}, but {he} thought only of {M}.

        {N} found {M} in bed, [pale and tired|with a red nose]. "[you came|you came all this way]!" {M} said. "[I promised|of course]," said {N}.
        "[I thought you would forget me|I could not come to you]," {M} said in a small voice. "so I came to you," said {N}.

        {N} [made hot soup|opened the window wide]. together they looked out at the [sky|stars], [just as they had promised|close together under one blanket].
        they sat by the window all night, and {N} told {fhim} every story {he} knew.

        soon, {M} was well again. "[a promise from you|a friend like you]," {fhe} said, "is [better than any medicine|worth more than gold]."
        and that is how it was: [wherever one of them was|when one of them could not come], the other one found a way.
        """,
    ),
)
