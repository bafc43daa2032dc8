"""Pure integer arithmetic that both datasets and plans are made of: permutations, apportionment."""
