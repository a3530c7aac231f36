"""Pictures of the dashboard for the pages: a healthy run, a slow generator, stale data and a hacked reward."""
