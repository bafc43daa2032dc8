"""How the plan is shared: ranks, lanes, steps."""
