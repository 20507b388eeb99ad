"""What `tools/chaos.py` is made of: a schedule (`plan`), a model (`model`), the process that owns the store (`owner`,
with `calls` and `faultio`), damage done from outside (`damage`), what looks on (`watchers`, `judge`), the conductor
(`conduct`), and the outcome (`report`)."""
