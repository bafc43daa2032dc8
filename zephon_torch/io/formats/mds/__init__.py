"""MDS: the shards of MosaicML Streaming."""
