"""Signals become a flag, and only while they are asked to."""

import os
import signal
import threading

import pytest

from jaxrl_llm.training.signals import SIGNALS, StopSignals


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_a_flag(number):
    before = [signal.getsignal(s) for s in SIGNALS]
    with StopSignals() as stop:
        assert not stop.requested and stop.name is None
        os.kill(os.getpid(), number)
        assert stop.requested and stop.name == number.name
        os.kill(os.getpid(), signal.SIGTERM)  # patient with a cluster that repeats itself
        assert stop.name == number.name
    assert [signal.getsignal(s) for s in SIGNALS] == before
    assert stop.requested


def test_a_process_alone_agrees_with_itself():
    with StopSignals() as stop:
        assert not stop.agreed()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.agreed() and stop.name == "SIGTERM"


def test_a_second_interrupt_stops_at_once():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), StopSignals():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


def test_nested_handlers_come_back_one_by_one():
    with StopSignals() as outer:
        with StopSignals() as inner:
            os.kill(os.getpid(), signal.SIGTERM)
            assert inner.requested and not outer.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert outer.requested


def test_handlers_come_back_after_an_error():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyError), StopSignals():
        raise KeyError
    assert signal.getsignal(signal.SIGTERM) == before


def test_entered_again_it_remembers():
    stop = StopSignals()
    with stop:
        os.kill(os.getpid(), signal.SIGINT)
    with stop:
        assert stop.requested


def test_off_the_main_thread_it_does_nothing():
    before, results = signal.getsignal(signal.SIGTERM), []

    def run():
        with StopSignals() as stop:
            results.append((stop.requested, signal.getsignal(signal.SIGTERM) == before))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert results == [(False, True)]
