"""Constraints become grammars: every kind, errors that name the place, one compile for equal ones, bounds."""

import asyncio
import json
import threading

import pytest

from jpaged.engine.tokenizer import NoTokenizer
from jpaged.errors import InvalidArgument, QueueFull, Unavailable, Unsupported
from jpaged.service.structured_output.compiler import GrammarCompiler, compile_now
from jpaged.service.structured_output.sandbox import GrammarLimits
from jpaged.service.structured_output.vocabulary import Vocabulary
from jpaged.structured import StructuredOutputs
from tests.service.structured_output.texts import EOS, VOCAB_SIZE, accepts, allowed, packaged_tokenizer

PAIR = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]}


def compiled(compiler, **fields):
    return compile_now(compiler, StructuredOutputs(**fields))


def problem_of(compiler, **fields):
    with pytest.raises(InvalidArgument) as caught:
        compiled(compiler, **fields)
    assert caught.value.field == f"sampling.structured_outputs.{next(iter(fields))}"
    return caught.value.problem


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"json": PAIR}, ['{"a":1}', '{"a": 1, "b": "x", "c": []}'], ["{}", '{"a":"1"}', '{"b":"x","a":1}']),
        ({"json": json.dumps(PAIR)}, ['{"a":1}'], ["{}"]),
        ({"json": True}, ["1", '["a"]'], ["a"]),
        ({"json": PAIR, "disable_any_whitespace": True}, ['{"a":1}'], ['{"a": 1}']),
        (
            {"json": PAIR},
            ['{ "a" : 1 }', '{\n    "a": 1,\n    "b": "x"\n}', '{\r\n\t"a":1}'],
            ['{"a":  1}', '{\n\n"a":1}', '{"a":\t1}', "{\n" + " " * 21 + '"a":1}', '{"a":1} ', ' {"a":1}'],
        ),
        ({"json": PAIR, "whitespace_pattern": r"[ \t\r\n]+"}, ["{\n\n" + " " * 40 + '"a":\t1}'], ['{"a":1} ']),
        ({"json_object": True}, ['{"a": [\n  1\n]}'], ["{  }", "{\t}"]),
        ({"json": PAIR, "whitespace_pattern": " ?"}, ['{"a": 1}'], ['{"a":  1}', '{"a":\n1}']),
        ({"json": PAIR, "disable_additional_properties": True}, ['{"a":1,"b":"x"}'], ['{"a":1,"c":2}']),
        ({"json_object": True}, ["{}", '{"a":[1,{"b":null}]}'], ["[]", "1"]),
        ({"json_object": True, "disable_any_whitespace": True}, ["{}"], ["{ }"]),
        ({"regex": r"\d{3}-[a-z]+"}, ["123-abc"], ["12-abc", "123-"]),
        ({"regex": r"[\d.]\D"}, ["1a", ".\u0663"], ["\u0663a", "11"]),
        ({"regex": " "}, [" "], [""]),
        ({"choice": ["  ", "\n", "\t\n"]}, ["  ", "\n", "\t\n"], [" ", "\t"]),
        ({"regex": r"^a/b\n$"}, ["a/b\n"], ["a/b"]),
        ({"regex": r"cost: 5\$"}, ["cost: 5$"], ["cost: 5"]),
        ({"choice": ["yes", "no", 'a "b"\n']}, ["yes", "no", 'a "b"\n'], ["maybe", "y", ""]),
        ({"grammar": 'start: "a" NUMBER\nNUMBER: /[0-9]+/'}, ["a12"], ["a"]),
        ({"grammar": 'root ::= "a" number\nnumber ::= [0-9]+'}, ["a12"], ["a"]),
        ({"grammar": '// root ::= in a comment\nstart: "a"'}, ["a"], ["b"]),
    ],
)
def test_every_kind_accepts_what_it_says(compiler, fields, good, bad):
    grammar = compiled(compiler, **fields)
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


def test_properties_of_nested_objects_are_closed_but_not_where_others_are_spoken_of(compiler):
    open_part = {"type": "object", "properties": {"x": {}}, "additionalProperties": True}
    schema = {"type": "object", "properties": {"in": {"items": {"anyOf": [PAIR]}}, "open": open_part}}
    grammar = compiled(compiler, json=schema, disable_additional_properties=True)
    assert accepts(grammar, '{"in":[{"a":1}],"open":{"y":1}}')
    assert not accepts(grammar, '{"in":[{"a":1,"c":1}]}')


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"json": '{"a":'}, "at line 1, column 6: is not JSON"),
        ({"json": '{\n"a": NaN}'}, "NaN is not a JSON number"),
        ({"json": "[" * 65}, "at line 1, column 65: is nested more than 64 levels deep"),
        ({"json": "[1]"}, "a schema must be an object, true or false, not [1]"),
        ({"json": False}, "is false"),
        ({"json": {"properties": {"a/b": {"items": {"not": {}}}}}}, 'at /properties/a~1b/items: not supported: "not"'),
        (
            {"json": {"prefixItems": [{}, {"pattern": "(a", "type": "string"}]}},
            "at /prefixItems/1: the regular expression '(a'",
        ),
        ({"json": {"$ref": "#/$defs/x", "$defs": {"x": {"type": "strin"}}}}, "at /$defs/x: Invalid type: strin"),
        ({"json": {"items": {"$ref": "http://a.b/c"}}}, "at /items"),
        (
            {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
            "no text matches",
        ),
        ({"json": "7"}, "a schema must be an object, true or false, not 7"),
        ({"regex": "ab(c"}, "at character 3: unclosed group"),
        ({"regex": "^a/b\n[z-a]$"}, "at character 7: invalid character class range"),
        ({"regex": "(?=a)b"}, "at character 1: look-around"),
        ({"grammar": 'root ::= "a" b'}, "at line 1, column 14: there is no rule named 'b'"),
        ({"grammar": 'start: "a" x\nx: y'}, "at line 2, column 4: unknown name"),
        ({"grammar": 'start: <|nothing|> "a"'}, "unknown special token"),
        ({"grammar": 'begin: "a"'}, "no start rule"),
        ({"structural_tag": "[]"}, "at /: must be an object"),
    ],
)
def test_what_is_no_grammar_is_refused_with_its_place(compiler, fields, problem):
    assert problem in problem_of(compiler, **fields)


def chain(count):
    rules = "\n".join(f'r{index}: "x{index}" r{(index + 1) % count}' for index in range(count))
    return f"start: {' | '.join(f'r{index}' for index in range(count))}\n{rules}"


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"json": {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (97, 101, 103, 107)]}}, "0.5 s"),
        ({"grammar": chain(10_000)}, "too large"),
        ({"grammar": f"start: {'(' * 20_000}"}, "nested"),
        ({"grammar": f"root ::= {'(' * 20_000}"}, "nested more than 100 levels deep"),
        ({"regex": "(" * 5000 + "a" + ")" * 5000}, ""),
        ({"json": {"enum": [{"a": {"b": index}} for index in range(20_000)]}}, ""),
        (
            {
                "json": {
                    "allOf": [
                        {"anyOf": [{"properties": {f"a{i}_{j}": {"type": "string"}}} for j in range(4)]}
                        for i in range(12)
                    ]
                }
            },
            "too large",
        ),
        ({"grammar": f"start: A\nA: {' & '.join(f'/(?s:.*)w{index}(?s:.*)/' for index in range(30))}"}, ""),
    ],
)
def test_what_takes_too_much_is_refused_and_the_next_is_served(vocabulary, fields, problem):
    # What is told of first is not to be a slow machine's time, nor the memory that a fast one fills in that time.
    cpu_s = 30.0 if problem in ("too large", "nested") else 0.5
    memory_bytes = (4096 if problem == "0.5 s" else 128) << 20
    compiler = GrammarCompiler(vocabulary, GrammarLimits(cpu_s=cpu_s, memory_bytes=memory_bytes, num_threads=1))
    try:
        assert problem in problem_of(compiler, **fields)
        assert accepts(compiled(compiler, choice=["yes"]), "yes")
    finally:
        compiler.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "(a{1,1000}){1,1000}"},
        {"regex": "(a|b)*a(a|b){25}"},
        {"regex": ".*a.{500}"},
        {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000}},
        {"json": {"type": "string", "minLength": 100_000, "pattern": "^(ab|c)*$"}},
        {"json": {"enum": [f"value number {index}" for index in range(2000)]}},
    ],
)
def test_what_looks_large_and_is_not_takes_a_bounded_step(compiler, fields):
    state = compiled(compiler, **fields).start()
    assert allowed(state) or state.failure


def test_a_step_that_takes_too_much_is_a_failure_of_its_state_alone(compiler):
    grammar = compiled(compiler, json={"type": "string", "minLength": 100_000, "pattern": "^(ab|c)*$"})
    state = grammar.start()
    for token_id in packaged_tokenizer().encode('"' + "c" * 50):
        allowed(state)
        state.accept(token_id)
    assert state.failure
    assert not state.has_ended
    assert grammar.start().failure is None


async def test_equal_constraints_that_come_together_are_compiled_once(compiler):
    before = compiler.num_compiles
    outputs = [StructuredOutputs(regex="together [0-9]+") for _ in range(20)]
    found = await asyncio.gather(*map(compiler.compile, outputs))
    assert len({id(grammar) for grammar in found}) == 1
    assert await compiler.compile(outputs[0]) is found[0]
    assert compiler.num_compiles == before + 1


def test_other_options_are_other_grammars(compiler):
    before = compiler.num_compiles
    compiled(compiler, json={"const": 1})
    compiled(compiler, json={"const": 1}, disable_any_whitespace=True)
    compiled(compiler, json={"const": 1}, always_complete=True)
    assert compiler.num_compiles == before + 3


def test_a_refusal_is_kept(compiler):
    before = compiler.num_compiles
    for _ in range(3):
        problem_of(compiler, regex="kept (")
    assert compiler.num_compiles == before + 1


async def test_who_goes_away_leaves_the_compile_to_others(compiler):
    outputs = StructuredOutputs(regex="left alone [a-z]+")
    gone, stays = asyncio.create_task(compiler.compile(outputs)), asyncio.create_task(compiler.compile(outputs))
    await asyncio.sleep(0)
    gone.cancel()
    assert accepts(await stays, "left alone x")
    assert gone.cancelled()


def test_the_cache_forgets_what_was_asked_for_longest_ago(vocabulary):
    compiler = GrammarCompiler(vocabulary, GrammarLimits(max_entries=2, num_threads=1))
    try:
        first = compiled(compiler, choice=["a"])
        compiled(compiler, choice=["b"])
        assert compiled(compiler, choice=["a"]) is first
        compiled(compiler, choice=["c"])
        assert compiled(compiler, choice=["a"]) is first
        assert compiler.num_compiles == 3
        compiled(compiler, choice=["b"])
        assert compiler.num_compiles == 4
    finally:
        compiler.close()


def test_the_cache_is_bounded_in_bytes(vocabulary):
    compiler = GrammarCompiler(vocabulary, GrammarLimits(max_bytes=1, num_threads=1))
    try:
        grammar = compiled(compiler, choice=["a"])
        assert grammar.num_bytes > 1
        assert compiled(compiler, choice=["a"]) is not grammar
        assert accepts(grammar, "a")
    finally:
        compiler.close()


def test_no_more_wait_than_the_limit(vocabulary, monkeypatch):
    compiler = GrammarCompiler(vocabulary, GrammarLimits(max_waiting=2, num_threads=1))
    release = threading.Event()

    def refuse(grammar):
        release.wait()
        raise Unavailable("released")

    monkeypatch.setattr(compiler._processes[0], "run", refuse)
    try:
        waiting = [compiler.submit(StructuredOutputs(choice=[text])) for text in "ab"]
        with pytest.raises(QueueFull, match="2 grammars are waiting"):
            compiler.submit(StructuredOutputs(choice=["c"]))
        release.set()
        for one in waiting:
            with pytest.raises(Unavailable, match="released"):
                one.result(60)
        assert isinstance(compiler.submit(StructuredOutputs(choice=["c"])).exception(60), Unavailable)
    finally:
        release.set()
        compiler.close()


@pytest.mark.long
def test_too_many_that_wait_are_refused(vocabulary, monkeypatch):
    compiler = GrammarCompiler(vocabulary, GrammarLimits(max_waiting=2, num_threads=1))
    go_on = threading.Event()
    trial = compiler._processes[0]
    run = trial.run
    monkeypatch.setattr(trial, "run", lambda grammar: (go_on.wait(), run(grammar))[1])
    try:
        waiting = [compiler.submit(StructuredOutputs(choice=[text])) for text in "ab"]
        with pytest.raises(QueueFull, match="2 grammars are waiting"):
            compiler.submit(StructuredOutputs(choice=["c"]))
        assert compiler.submit(StructuredOutputs(choice=["a"])) is waiting[0]
        go_on.set()
        assert [accepts(one.result(), text) for one, text in zip(waiting, "ab", strict=True)] == [True, True]
    finally:
        go_on.set()
        compiler.close()


@pytest.mark.long
def test_a_process_that_died_is_started_again(vocabulary):
    compiler = GrammarCompiler(vocabulary, GrammarLimits(num_threads=1))
    try:
        compiled(compiler, choice=["a"])
        child = compiler._processes[0]._child
        assert child is not None
        child.end()
        with pytest.raises(Unavailable, match="did not answer"):
            compiled(compiler, choice=["b"])
        assert accepts(compiled(compiler, choice=["b"]), "b")
    finally:
        compiler.close()


def test_a_closed_compiler_says_so(vocabulary):
    compiler = GrammarCompiler(vocabulary, GrammarLimits(num_threads=1))
    compiler.close()
    with pytest.raises(Unavailable, match="shutting down"):
        compiler.submit(StructuredOutputs(choice=["a"]))


@pytest.mark.parametrize("vocab_size", [3000, 3200])
def test_a_model_may_have_fewer_or_more_ids_than_its_tokenizer(vocab_size):
    vocabulary = Vocabulary.of(packaged_tokenizer(), vocab_size, {EOS})
    compiler = GrammarCompiler(vocabulary, GrammarLimits(num_threads=1))
    try:
        state = compiled(compiler, regex="(?s:.*)").start()
        found = allowed(state, vocab_size)
        assert vocabulary.num_words == (vocab_size + 31) // 32
        assert max(found) < min(vocab_size, VOCAB_SIZE)
        assert len(found) > 2900
    finally:
        compiler.close()


@pytest.mark.long
def test_every_token_that_ends_a_text_may_end_it():
    vocabulary = Vocabulary.of(packaged_tokenizer(), VOCAB_SIZE, {0, 1, 9999})
    compiler = GrammarCompiler(vocabulary, GrammarLimits(num_threads=1))
    try:
        state = compiled(compiler, choice=["a", "ab"]).start()
        assert state.accept(packaged_tokenizer().encode("a")[0])
        assert {0, 1} < set(allowed(state))
        assert state.accept(1)
        assert state.has_ended
    finally:
        compiler.close()


@pytest.mark.long
def test_what_cannot_have_grammars_says_why():
    with pytest.raises(Unsupported, match=r"tokenizer\.json"):
        Vocabulary.of(NoTokenizer(100), 100, {0})
    with pytest.raises(Unsupported, match="end-of-sequence"):
        Vocabulary.of(packaged_tokenizer(), VOCAB_SIZE, ())
