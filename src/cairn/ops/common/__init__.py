"""What several commands share: output, logs, locations and times."""
