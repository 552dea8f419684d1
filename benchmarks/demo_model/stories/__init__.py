"""The grammar of the demo's stories.

grammar.py         a seed -> a story
prompts.py         how stories begin
cast.py            who is in them
lexicon.py         the words, by their kind
notation.py        how a plot is written down
plots.py           a plot, and what all plots share
plots_heart.py     plots of the heart
plots_journey.py   plots of a journey
plots_laughter.py  plots to laugh at
"""
