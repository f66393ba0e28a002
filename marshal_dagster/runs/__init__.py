"""What Dagster knows of runs: their status, announcements and logs, and what dead members left."""
