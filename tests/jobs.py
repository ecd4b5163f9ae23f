"""Jobs of several processes on this machine, whose processes stay from one run to the next."""

import os
import signal
import traceback
from multiprocessing import Pipe
from multiprocessing.connection import wait

import torch._dynamo  # an optimizer imports it, and each process would do so anew
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401
from helpers import fork, ranks


class Job:
    """Processes that are forked once, and call functions together: each call is a new job, with an
    address of its own."""

    def __init__(self, size, folder):
        self.logs = [folder / f'log{rank}' for rank in range(size)]
        self.pids, self.pipes = [], []

    def run(self, function, *arguments):
        """Call a function of a test module in all processes → what rank 0 printed."""
        self.begin(function, *arguments)
        return self.end()

    def begin(self, function, *arguments):
        if not self.pids:
            for log in self.logs:
                ours, theirs = Pipe()
                self.pids.append(fork(lambda _, pipe=theirs: serve(pipe), log=log))
                self.pipes.append(ours)
                theirs.close()
        for pipe, env in zip(self.pipes, ranks(len(self.pids)), strict=True):
            pipe.send((env, function, arguments))

    def end(self):
        running, failed = list(self.pipes), ''
        while running and not failed:
            for pipe in wait(running):
                running.remove(pipe)
                failed += pipe.recv()
        if failed:
            self.close()  # the others may wait for the one that failed
        assert not failed, failed + ''.join(log.read_text() for log in self.logs)
        return self.logs[0].read_text()

    def close(self):
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.pids, self.pipes = [], []


def serve(pipe):
    """In a process of a Job: call what comes, and answer with the error, or ''."""
    while True:
        signal.alarm(1000)  # for as long as the tests may have other work
        env, function, arguments = pipe.recv()
        signal.alarm(300)
        os.environ.update(env)
        for fd in (1, 2):
            os.ftruncate(fd, 0)
            os.lseek(fd, 0, os.SEEK_SET)
        error = ''
        try:
            function(*arguments)
        except BaseException:
            error = traceback.format_exc()
        pipe.send(error)
