"""Measurements that are run by hand: what one piece of the code costs."""
