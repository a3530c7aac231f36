"""Looking at runs: from the files of a run's folder to timelines, diagnoses, pages and exports."""
