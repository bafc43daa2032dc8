"""Progress inside a model, and loaders in the shape that a trainer wants."""
