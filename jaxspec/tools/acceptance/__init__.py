"""Acceptance measured round by round, beside what theory expects of the same rounds.

expected  the rules' expected acceptance from p and q
lengths   the ranges of prompt lengths that acceptance is counted in
rounds    decoding that records both
summary   figures with standard errors
show      tables, sentences and the plot
"""
