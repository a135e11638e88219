"""What Shoal's own tests are written with, shipped for people who extend it: ranks as processes, parity, golden values."""
