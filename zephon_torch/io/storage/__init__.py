"""Files wherever they are: listing, byte ranges, retries; and the protocol of readers."""
