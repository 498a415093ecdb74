"""Declared limits of attention backends, as data. The rows stand in table_*.py.

A row says what a backend's source declares; what was wrong in public although declared stands in
quirks.py. `native` rows are ours, `vllm` rows are judged only: the vLLM engine runs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

from engine.attention.devices import ANYWHERE, DeviceProfile, Range, covered


class Kind(StrEnum):
    """Families of attention layers: what the KV of a token is and how it is read."""

    MHA = "mha"
    MLA = "mla"
    SPARSE_MLA = "sparse_mla"
    DSV4 = "dsv4"


class GraphLevel(IntEnum):
    """Which batches a backend may be captured for in a CUDA graph; each level includes those below.

    UNIFORM_SINGLE: one query token a request. UNIFORM: as many query tokens for every request.
    ALWAYS: any mix.
    """

    NEVER = 0
    UNIFORM_SINGLE = 1
    UNIFORM = 2
    ALWAYS = 3


@dataclass(frozen=True, slots=True)
class KvRule:
    """KV dtypes that are accepted, and what is stored for them: `stored` "" stores the dtype
    itself, `auto` being the model's. `only` are CPU features of which one is needed."""

    accepts: tuple[str, ...]
    stored: str = ""
    on: tuple[Range, ...] = ANYWHERE
    only: tuple[str, ...] = ()

    def fits(self, dtype: str, device: DeviceProfile) -> bool:
        if dtype not in self.accepts or not covered(self.on, device):
            return False
        return not self.only or any(feature in device.features for feature in self.only)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers that are accepted: listed ones, or multiples inside [low, high]."""

    listed: tuple[int, ...] = ()
    multiple: int = 1
    low: int = 1
    high: int | None = None
    on: tuple[Range, ...] = ANYWHERE

    def fits(self, value: int) -> bool:
        if self.listed:
            return value in self.listed
        above = self.high is not None and value > self.high
        return value % self.multiple == 0 and value >= self.low and not above

    def __str__(self) -> str:
        if self.listed:
            return "/".join(map(str, self.listed))
        words = [f"multiples of {self.multiple}"] if self.multiple > 1 else []
        words += [f"{self.low} or more"] if self.low > self.multiple else []
        words += [f"up to {self.high}"] if self.high else []
        return " ".join(words) or "any"


@dataclass(frozen=True, slots=True)
class GraphRule:
    """A level and when it holds; None means either. The first rule that fits counts."""

    level: GraphLevel
    causal: bool | None = None
    dcp: bool | None = None
    windowed: bool | None = None
    single_token: bool | None = None
    on: tuple[Range, ...] = ANYWHERE


@dataclass(frozen=True, slots=True)
class Backend:
    """One row. Sizes count tokens (pages) and elements (heads).

    non_causal_full             non-causal layers may be without a window
    dcp_causal, dcp_non_causal  decode context parallelism with the KV sharded over the ranks
    dcp_kv                      KV dtypes with which it can, empty: all
    dcp_group_non_causal        non-causal layers may run in a process with DCP at all, even with
                                KV of their own on every rank
    dcp_draft_block             causal draft blocks of several tokens with sharded KV
    lse_base                    of the log-sum-exp it returns: "e", "2", "" for none
    non_causal_kv_refused       KV dtypes with which non-causal layers fail
    implemented, ran_on_gpu     by us
    """

    name: str
    kinds: tuple[Kind, ...]
    on: tuple[Range, ...]
    dtypes: tuple[str, ...]
    kv: tuple[KvRule, ...]
    pages: tuple[Sizes, ...]
    heads: tuple[Sizes, ...] = (Sizes(),)
    qk_nope: tuple[int, ...] = ()
    index_topk: int | None = None
    causal: bool = True
    non_causal: bool = False
    non_causal_full: bool = True
    window: bool = False
    sinks: tuple[Range, ...] = ()
    dcp_causal: bool = False
    dcp_non_causal: bool = False
    dcp_kv: tuple[str, ...] = ()
    dcp_group_non_causal: bool = True
    dcp_draft_block: bool = True
    non_causal_kv_refused: tuple[str, ...] = ()
    lse_base: str = ""
    graphs: tuple[GraphRule, ...] = (GraphRule(GraphLevel.NEVER),)
    implemented: bool = False
    ran_on_gpu: bool = False
    note: str = ""

    def kv_rule(self, dtype: str, device: DeviceProfile) -> KvRule | None:
        return next((rule for rule in self.kv if rule.fits(dtype, device)), None)

    def takes_page(self, tokens: int, device: DeviceProfile) -> bool:
        rule = self.page_rule(device)
        return rule is None or rule.fits(tokens)

    def page_rule(self, device: DeviceProfile) -> Sizes | None:
        return next((rule for rule in self.pages if covered(rule.on, device)), None)

    def head_rule(self, device: DeviceProfile) -> Sizes | None:
        return next((rule for rule in self.heads if covered(rule.on, device)), None)

    def kv_accepted(self, device: DeviceProfile) -> tuple[str, ...]:
        names = [n for rule in self.kv for n in rule.accepts if rule.fits(n, device)]
        return tuple(dict.fromkeys(names))

    def graph_level(
        self, device: DeviceProfile, *, causal: bool, dcp: int, windowed: bool, query_tokens: int
    ) -> GraphLevel:
        for rule in self.graphs:
            wanted = (
                (rule.causal, causal),
                (rule.dcp, dcp > 1),
                (rule.windowed, windowed),
                (rule.single_token, query_tokens == 1),
            )
            if covered(rule.on, device) and all(want in (None, is_) for want, is_ in wanted):
                return rule.level
        return GraphLevel.NEVER
