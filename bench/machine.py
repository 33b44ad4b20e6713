"""What the results were measured on: enough to repeat them, nothing about who or where."""

import json
import os
import platform
import subprocess


def field(path, name):
    """The first value of `name` in a file of "name : value" lines."""
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return "unknown"


def distribution():
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        return "unknown"


def describe(build):
    info = json.loads(subprocess.run([f"{build}/bin/wherry", "info", "--json"], check=True,
                                     capture_output=True, text=True).stdout)
    kib = int(field("/proc/meminfo", "MemTotal").split()[0])
    return {
        "cpu": field("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(kib * 1024 / 1e9, 1),
        "os": distribution(),
        "kernel": platform.release(),
        "compiler": info["compiler"],
        "flags": info["flags"],
        "wherry": info["version"],
        "commit": info["commit"],
    }
