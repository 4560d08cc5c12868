"""From files on disk to typed batches: manifest, buckets, plan, decode, caches, loader, Moving Shapes."""
