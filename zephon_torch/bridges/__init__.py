"""What trainers expect of a running loader."""
