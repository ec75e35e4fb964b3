"""``reft rehearse``: a job is run undisturbed and with a trainer killed, and compared step by step.

- ``record``: what trainers write down, switched on by an environment variable;
- ``keep``: what the script writes goes into the rehearsal's directory;
- ``compare``: pure, from records to what differed first, and where;
- ``run``: runs the job, again and again, kills, and leaves nothing behind.
"""
