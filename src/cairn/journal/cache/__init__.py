"""What slabs, blocks and their files hold, and what is evicted or removed next: pure decisions."""
