#!/usr/bin/env python3
"""An OCI runtime: runc, without negative OOM scores, which a machine without CAP_SYS_RESOURCE cannot set.

Kubernetes gives its pause containers one.
"""

import json
import os
import sys
from pathlib import Path

arguments = sys.argv[1:]
if "create" in arguments and "--bundle" in arguments:
    file = Path(arguments[arguments.index("--bundle") + 1], "config.json")
    config = json.loads(file.read_text())
    if config.get("process", {}).get("oomScoreAdj", 0) < 0:
        del config["process"]["oomScoreAdj"]
        file.write_text(json.dumps(config))
os.execvp("runc", ["runc", *arguments])
