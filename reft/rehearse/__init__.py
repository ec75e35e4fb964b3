"""``reft rehearse``: runs a job undisturbed and with a trainer killed, and compares step by step.

- ``record``: records of the trainers, enabled by an environment variable;
- ``keep``: redirects the script's output files into the rehearsal's directory;
- ``compare``: pure; finds the first difference between two records;
- ``run``: runs the job repeatedly, kills, and cleans up.
"""
