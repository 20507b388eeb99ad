"""What `tools/chaos.py` is made of.

A schedule (`plan`, `serverplan`), a model and the journal by which processes share it (`model`), the process that owns
the store (`owner`) or one of several that use its servers (`client`), both of which work (`workers`, `calls`) and obey
(`obey`); faults below a process (`faultio`, `diskserver`), from outside (`damage`) and on the wire (`wireproxy`);
what looks on (`watchers`, `judge`, `probes`, `patience`), the conductors (`conduct`, `serverconduct` with `servers`),
and how a run ends (`ending`, `report`)."""
