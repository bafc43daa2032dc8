"""Work sources: what hands out the plan."""
