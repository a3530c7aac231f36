"""The records of journals before msgspec packed them: tagged lists, and one class for the whole state of a stream.

    tuple, list, set, frozenset     ["tuple", member, …]
    dict, Counter                   ["dict", key, value, key, value, …]
    an int of more than 64 bits     ["int", "digits"]
    a member of State               ["State", "READY"]
    an object                       ["Leased", value, value, …], in the order of SCHEMA_BEFORE

They are only read: a broker that finds such a journal begins with a snapshot in the records of now.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args

import msgpack
import msgspec

from asyncrl.errors import JournalError
from asyncrl.queue.ledger.events import LATER, Event
from asyncrl.queue.ledger.state.ledger_state import LedgerState
from asyncrl.queue.ledger.state.steps import Steps
from asyncrl.queue.ledger.state.tasks import State, Tasks
from asyncrl.queue.storage.records import Closed, Happened, Posted, Record, StreamState, TasksKept, as_counter

SCHEMA_BEFORE = """
Bias(_finished,_trained);Book(settings,learner_epoch,opener,closed,draining,attempt,unmade,gone,lineage,
version,ranks,dropped,published,grants,items,next,head,pending,leased,ready,ready_tokens,partial,leases,
stages,claims,claimed,recorded,replay,retention,exhausted,lead,bias,sizes,nbytes,kept_bytes);
Checkpointed(version);Closed(reason);Collected(ordinals);Column(epoch,digest,version);Committed(ordinal,
tokens,nbytes,start_version,digest,columns,squares);Drained();Dropped(ordinal,reason);Exhausted();
Finished(reason);Forked(lineage);Frontier(lineage,version,frontier,kept,trained,dropped_ordinals,dropped,
published,grants);Happened(stream,event);Item(state,min_version,epoch,held,progress,tokens,squares,nbytes,
start_version,digest,columns,staging,added,lost);Lead(groups,debt);LeadSet(lead);Lease(ordinal,stage,worker,
epoch,at,deadline);Leased(ordinal,worker,grant,held,at,deadline);Leases(_by_epoch,_earliest);Posted(key,
value);Progressed(ordinal,nbytes);Ranks(frontier,kept,trained,dropped);Recovered(at,deadline,lost);
Renewed(epochs,deadline);Requeued(ordinal,why);Retention(floor,steps,_forks);Rewound(settings,learner_epoch,
lineage,frontier,opener);Sizes(means,counts,whole);Stage(name,needs,adds);StageCommitted(stage,ordinal,
nbytes,version,digest);StageLeased(stage,ordinal,worker,grant,at,deadline);StageReturned(stage,ordinal,why);
Stages(by_name,waiting,lacking);State(name);Step(claims,whole,before,items);StepAbandoned(step,dropped,
reason);StepClaimed(step,number,shares,last);StepRejected(step,reason);StepTrained(step);
SteppedBack(settings,learner_epoch,lineage,frontier,opener);StreamOpened(settings,learner_epoch,opener);
StreamSettings(groups_per_version,max_staleness,window,depth,max_bytes,lease_s,learners,columns,stages,
wait_share,retain,even_tokens);StreamState(stream,book);Submitted(first,tasks,min_version);TasksKept(stream,
tasks);Waiting(_members,_heap)
""".replace("\n", "")

_FIELDS = {
    kind: names[:-1].split(",") if names != ")" else []
    for kind, _, names in (each.partition("(") for each in SCHEMA_BEFORE.split(";"))
}
_RENAMED = {
    "_by_epoch": "by_epoch",
    "_earliest": "earliest",
    "_finished": "made",
    "_forks": "forks",
    "_trained": "used",
    "items": "records",
    "retention": "retained",
}
_EVENTS = {cls.__name__: cls for cls in get_args(Event)}


def decode_before(packed: bytes) -> Record:
    """JournalError for anything but a record of SCHEMA_BEFORE."""
    try:
        record = msgpack.unpackb(packed, raw=False, use_list=True)
        match record:
            case ["Happened", str(stream), [name, *_] as event]:
                return Happened(stream, msgspec.convert(_untagged(event), _EVENTS[name]))
            case ["TasksKept", stream, tasks]:
                return msgspec.convert((stream, _untagged(tasks)), TasksKept)
            case ["Posted", key, value]:
                return msgspec.convert((key, value), Posted)
            case ["Closed", reason]:
                return msgspec.convert((reason,), Closed)
            case ["StreamState", str(stream), book]:
                state = _state(_untagged(book))
                return StreamState(stream, msgspec.convert(state, LedgerState, dec_hook=as_counter))
    except (ValueError, TypeError, LookupError, AttributeError, msgpack.UnpackException) as error:
        raise JournalError(f"a record of before: {error!r}") from error
    raise JournalError(f"a record of before of unknown kind {str(record)[:80]!r}")


def _untagged(tree: Any) -> Any:
    """Lists, dicts and plain values, as msgspec converts them: a list for an event, a dict for another object."""
    if type(tree) is not list:
        return tree
    tag, values = tree[0], [_untagged(member) for member in tree[1:]]
    if tag in ("tuple", "list", "set", "frozenset"):
        return values
    if tag in ("dict", "Counter"):
        return dict(zip(values[::2], values[1::2], strict=True))
    if tag == "int":
        return int(values[0])
    if tag == "State":
        return State[values[0]].value
    named = dict(zip(_FIELDS[tag], values, strict=True))
    if event := _EVENTS.get(tag):
        return [named[name] for name in event._fields if f"{tag}.{name}" not in LATER]
    return {_RENAMED.get(name, name): value for name, value in named.items()}


def _state(book: dict[str, Any]) -> dict[str, Any]:
    """The parts of the one class that held all of a stream's state."""
    stages, sizes = book["stages"], book["sizes"]
    waiting = {name: sorted(each["_members"]) for name, each in stages["waiting"].items()}
    usage = {
        "live": book["nbytes"],
        "retained": book["kept_bytes"],
        "unmade": book["unmade"],
        "gone": book["gone"],
        "means": sizes["means"],
        "counts": sizes["counts"],
        "group": sizes["whole"],
    }
    parts = {
        "tasks": _picked(book, Tasks),
        "steps": _picked(book, Steps),
        "leases": {**book["leases"], "grants": book["grants"]},
        "stages": {**stages, "waiting": waiting},
        "usage": usage,
    }
    return _picked({**book, **parts}, LedgerState)


def _picked(values: dict[str, Any], part: Any) -> dict[str, Any]:
    return {field.name: values[field.name] for field in fields(part)}
