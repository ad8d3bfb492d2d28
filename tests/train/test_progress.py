"""What is shown of a run, in a terminal and elsewhere; and MFU."""

import io

import pytest

from partita.facts.model import Model
from partita.train.mfu import Utilisation
from partita.train.progress import Progress, Shown, line


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


def run(stream, steps=4, **options):
    with Progress(steps, stream=stream, **options) as progress:
        progress.say("sample [abc]")
        for step in range(steps):
            progress.update(Shown(step, loss=4.0 - step, held_out=1.5 if step == 1 else None))
    return stream.getvalue()


def test_a_line_shows_what_is_known():
    shown = Shown(2, 2.34567, 3e-4, 1.2345, 12345.6, 0.4123, "causal", 3 * 2**29, 2.5)
    assert line(shown, 100) == (
        "step   3/100  loss 2.3457  held out 2.5000  rate 3.00e-04  norm 1.23  12,346 tokens/s  "
        "MFU 41.2 % (causal attention)  memory 1.50 GiB"
    )
    assert line(Shown(0, 1.0), 9) == "step 1/9  loss 1.0000"


def test_plain_lines_where_there_is_no_terminal():
    out = run(io.StringIO(), clock=Clock())
    assert out.splitlines() == [
        "sample [abc]",
        "step 1/4  loss 4.0000",
        "step 2/4  loss 3.0000  held out 1.5000",
        "step 4/4  loss 1.0000",
    ]


def test_plain_lines_come_at_an_interval():
    clock, out = Clock(), io.StringIO()
    with Progress(1000, stream=out, every_s=5.0, clock=clock) as progress:
        for step in range(100):
            progress.update(Shown(step, loss=1.0))
            clock.now += 1.0
    assert len(out.getvalue().splitlines()) == 20


def test_a_terminal_is_redrawn_and_keeps_messages(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = run(Terminal())
    assert "\x1b[" in out and "sample [abc]" in out and "4/4" in out and "step 4/4  loss 1.0000" in out
    assert "\x1b[38;5;" in out or "\x1b[3" in out or "\x1b[9" in out


def test_no_color_is_obeyed(monkeypatch):
    import re

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    out = run(Terminal())
    codes = {code for found in re.findall(r"\x1b\[([0-9;]*)m", out) for code in found.split(";")}
    assert not {c for c in codes if c.isdigit() and int(c) >= 30}, "a colour code was written"


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in run(Terminal())


def test_other_ranks_show_nothing():
    assert run(io.StringIO(), enabled=False) == "" == run(Terminal(), enabled=False)


def test_mfu_by_hand():
    model = Model("tiny", "llama", layers=2, hidden=8, ffn=12, heads=2, kv_heads=1, head_dim=4, vocab=11)
    matrices = 2 * (8 * 8 + 2 * 4 * 8 + 8 * 8 + 3 * 8 * 12) + 11 * 8
    tokens, sequence = 30, 10
    full = 6 * matrices * tokens + 12 * 2 * 8 * sequence * tokens
    use = Utilisation(model, tokens, sequence, devices=2, peak_flops=1e6)
    assert use.flops_per_step == full
    assert use.of(0.5) == pytest.approx(full / 1e6)
    assert Utilisation(model, tokens, sequence, 2, 1e6, "causal").of(0.5) == pytest.approx(
        (full - 6 * 2 * 8 * sequence * tokens) / 1e6
    )
    assert Utilisation(model, tokens, sequence, 2, None).of(0.5) is None
    assert use.of(0.0) is None
