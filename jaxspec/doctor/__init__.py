"""Why a head is accepted less than it could be: other readings of its files, tried and measured.

formats     ways to give a prompt to the target: chat templates and their thinking switch
texts       the target's own greedy texts, and its hidden states over them
head        a head with all its tensors, and the ways to read it
acceptance  how many drafts of a reading the texts accept, without decoding
diagnosis   the search for the reading that is accepted most, and what to set
"""
