"""The order of an epoch: weights, stop rules, interleaving, shuffling."""
