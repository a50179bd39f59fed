"""Judges that do what graders should not: be late, and crash. Named to the pool as "module:function"."""

import os
import signal
import time


def careless():
    def judge(request, understood):
        if request.get("crash"):
            os.kill(os.getpid(), signal.SIGKILL)
        if request.get("raise"):
            raise ValueError("cannot judge this")
        time.sleep(request.get("before", 0))
        understood()
        if request.get("fill"):
            bytearray(2**34)
        time.sleep(request.get("after", 0))
        return request.get("score", 1.0)

    return judge


def unavailable():
    import no_such_library

    return no_such_library
