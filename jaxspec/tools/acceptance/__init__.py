"""Acceptance measured round by round, beside what theory expects of the same rounds.

`expected.py` the rules' expected acceptance from p and q, `rounds.py` decoding that records both, `summary.py` figures with standard
errors, `show.py` tables, sentences and the plot.
"""
