"""The faults that drills inject."""
