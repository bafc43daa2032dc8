"""The loader: arguments, position, iteration, and the face that torch code knows."""
