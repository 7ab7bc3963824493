"""The parts of the benchmark: each measures one thing and gives rows of the report."""
