"""Peers that behave well and badly, for the tests of `hasten bench attention`. Needs torch alone."""

import os

import torch
from torch import nn


class Unsupported(Exception):
    pass


REFUSALS = (Unsupported,)


class Scale(nn.Module):
    """x times a parameter; forms an N x N matrix besides where `square`."""

    def __init__(self, square: bool = False, crash_at: int = 0):
        super().__init__()
        self.scale, self.square, self.crash_at = nn.Parameter(torch.ones(())), square, crash_at

    def forward(self, x):
        if x.shape[1] == self.crash_at:
            os._exit(3)
        if self.square:
            torch.ones(x.shape[1], x.shape[1])
        return x * self.scale


class Greedy(nn.Module):
    def forward(self, x):
        return x * torch.ones(2**33).sum()


class Broken(nn.Module):
    def forward(self, x):
        raise ValueError("two\nlines")


def names():
    return {name: "" for name in ("good", "square", "wrong", "late", "crash", "greedy", "broken")}


def facts(name):
    return {"kind": name, "setting": "as is", "versions": {"torch": "other"}}


def check(name, sizes):
    return "it is off" if name == "wrong" else ""


def build(name, sizes):
    if name == "late" and sizes["length"] < 32:
        raise Unsupported("too short")
    if name in ("greedy", "broken"):
        return {"greedy": Greedy, "broken": Broken}[name]()
    return Scale(name == "square", crash_at=32 if name == "crash" else 0)
