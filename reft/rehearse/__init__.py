"""``reft rehearse``: runs a job undisturbed and with a trainer killed, and compares step by step.

- ``record``: records every step in the trainers, enabled by an environment variable;
- ``keep``: redirects the script's output files into the rehearsal's directory;
- ``compare``: finds the differences between the records of two runs (pure);
- ``run``: runs the job repeatedly, kills trainers or nodes, and cleans up.
"""
