"""What the scripts share: command lines, reports, acceptance and benchmark runs, memory plans."""
