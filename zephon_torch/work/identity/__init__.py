"""Identity of plans: fingerprint, description, and the state that carries them."""
