"""EBNF means what llama.cpp and xgrammar take it for, and errors name line and column."""

import pytest

from jpaged.service.structured_output.compiler import compile_now
from jpaged.service.structured_output.ebnf import EbnfError, is_ebnf, to_lark
from jpaged.structured import StructuredOutputs
from tests.service.structured_output.texts import accepts

JSON = r"""
# a comment ::= that says nothing
root ::= value
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
QUERY = """
root ::= select
select ::= "SELECT " column
   " from " table
table ::= "t1"
  | "t2"
column ::= ("a" | "b")+
"""


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (JSON, ['{"a": [1, 2.5e3, {"b":"x\\u00e9"}], "c": null}', "[]", "-1"], ['{"a" 1}', "[1,]", "01x", ""]),
        (QUERY, ["SELECT ab from t1", "SELECT b from t2"], ["SELECT  from t1", "SELECT a from t3"]),
        (r'root ::= "\u00e9" [\u0041-\U0000005A]+ x' "\n" 'x ::= "(" x ")" | ""', ["éAZ((()))", "éA"], ["éAZ(()", "é"]),
        ('root ::= e ("+" e)*\ne ::= [a-z]+ [a-z] | "(" root ")"', ["ab+(cd+ef)"], ["a", "ab+"]),
        ('root ::= ([a-z]+ [a-z] | "(" root ")")+', ["ab", "(ab)cd"], ["a", "(a)cd", "ab("]),
        ("root ::= [a-z]+ [a-z] '!'", ["ab!"], ["a!", "ab"]),
        ('root ::= "a"{2} "b"{1,2} "c"{2,} .', ["aabccx", "aabbccc\n"], ["abccx", "aabbbccx"]),
        ('root ::= [^a-c\\]] [-x] [x-] ("" | "y")', ["d--", "]xx"[1:] + "x", "z-xy"], ["a--", "]--"]),
        ('root ::= "say \\"hi\\"\\n\\t\\\\"', ['say "hi"\n\t\\'], ["say hi"]),
        ('a-b.c ::= "x"\nroot::=a-b.c a-b.c', ["xx"], ["x"]),
        ('root ::= [^] "\\x41"', ["zA"], ["A"]),
    ],
)
def test_texts_are_those_of_the_grammar(compiler, grammar, good, bad):
    compiled = compile_now(compiler, StructuredOutputs(grammar=grammar))
    assert [text for text in good if not accepts(compiled, text)] == []
    assert [text for text in bad if accepts(compiled, text)] == []


@pytest.mark.parametrize(
    ("grammar", "place", "problem"),
    [
        ('root ::= "a', "line 1, column 10", "this string is never closed"),
        ("root ::= [a", "line 1, column 10", "never closed"),
        ("root ::= (a", "line 1, column 10", "this bracket is never closed"),
        ('\nroot ::= "a"\n  b', "line 3, column 3", "there is no rule named 'b'"),
        ('x ::= "a"', "line 1, column 1", "no rule named root"),
        ('root ::= "a" )', "line 1, column 14", "')' is not expected"),
        ("root ::= [z-a]", "line 1, column 11", "a range is reversed"),
        ("root ::= []", "line 1, column 10", "character class is empty"),
        ('root ::= "\\q"', "line 1, column 11", "unknown escape \\q"),
        ('root ::= "\\u12"', "line 1, column 11", "requires 4 hexadecimal digits"),
        ('root ::= "\\uD800"', "line 1, column 11", "is not a character"),
        ('root "a"', "line 1, column 6", "::= is expected"),
        ('root ::= "a"{3,2}', "line 1, column 13", "the maximum of a count is below its minimum"),
        ('root ::= "a"{x}', "line 1, column 13", "a count must be"),
        ('root ::= "a"{99999999999}', "line 1, column 13", "over the limit"),
        ('root ::= (="a") "b"', "line 1, column 10", "lookahead"),
        ("root ::= " + "(" * 200, "line 1, column 110", "nested more than 100 levels deep"),
        ('root ::= "a"\n\nroot ::= "b"', "line 3, column 1", "is defined twice"),
        ('root ::= "a"\nx = "b"', "line 2, column 3", "'=' is not expected"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(grammar, place, problem):
    with pytest.raises(EbnfError) as caught:
        to_lark(grammar)
    assert str(caught.value).startswith(f"{place}: ")
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [('root ::= "a"', True), ('start: "a"', False), ('start: "a" // ::=', False), ('# ::=\nstart: "a"', False)],
)
def test_a_grammar_with_rules_of_its_own_sign_is_ebnf(text, expected):
    assert is_ebnf(text) is expected
