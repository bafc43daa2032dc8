"""What makes two plans the same plan, and the state that remembers it."""
