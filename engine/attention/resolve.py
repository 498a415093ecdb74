"""From a request and a device to an attention backend, or to a refusal that explains itself.

Pure, and without torch: a Blackwell deployment is checked on a laptop. What was asked for and is
not possible is refused; it is never replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.attention.capabilities import Backend
from engine.attention.checks import level_of, reasons_of, warnings_of
from engine.attention.devices import DeviceProfile
from engine.attention.geometry import Geometry, geometry_of, stored_dtype
from engine.attention.graphs import choose_graphs
from engine.attention.mode import LayerMode
from engine.attention.policy import Policy, policy_for
from engine.attention.refusal import AttentionRefused, layers_of, merged, refuse
from engine.attention.report import Candidate
from engine.attention.request import KVGroup, Request, dtype_name
from engine.attention.resolution import LayerGroup, Resolution
from engine.attention.tables import Table, order_for, table_for

PAGE_SIZES = (16, 32, 64, 128, 256, 512, 1024)


def resolve(
    request: Request,
    device: DeviceProfile,
    target: Resolution | None = None,
    table: Table | None = None,
) -> Resolution:
    """Raises AttentionRefused. `target` is the resolution of the target that a draft runs beside;
    it binds the draft only where they share pages (`kv_group`), and is never written to.
    """
    rows = table if table is not None else table_for(request.engine)
    return _Resolver(request, device, target, rows).resolve()


class _Resolver:
    """One resolution; holds what all its steps read."""

    def __init__(
        self, request: Request, device: DeviceProfile, target: Resolution | None, table: Table
    ) -> None:
        self.asked, self.device, self.target, self.table = request, device, target, table
        self.bound = None if request.kv_group is KVGroup.PRIVATE or not target else target.geometry
        page, kv_dtype = request.page_tokens, request.kv_dtype
        if target is not None and self.bound is not None:
            page = self.bound.page_tokens if page is None else page
            if request.kv_group is KVGroup.SAME_CACHE and dtype_name(kv_dtype) == "auto":
                kv_dtype = target.request.kv_dtype  # one cache, so what was asked for it
        self.request = replace(request, page_tokens=page, kv_dtype=kv_dtype)

    def resolve(self) -> Resolution:
        policies = {mode: self._policy(mode) for mode in self._modes()}
        judged = {mode: self._judge(mode, policies[mode].name) for mode in policies}
        chosen = self._choose(policies, judged)
        page = self._page_tokens(chosen, judged)
        first = next(iter(chosen.values()))
        geometry = self._geometry(first, page)
        groups = tuple(
            LayerGroup(
                layers_of(mode, self.request.shape.modes),
                mode,
                backend.name,
                level_of(backend, self.request, self.device, mode),
                judged[mode],
            )
            for mode, backend in chosen.items()
        )
        lowest = min(groups, key=lambda group: group.level)
        policy = next(iter(policies.values()))
        return Resolution(
            request=self.asked,
            device=self.device.name,
            policy=policy.policy,
            inherited=policy.inherited,
            groups=groups,
            candidates=self._merged(judged),
            geometry=geometry,
            graphs=choose_graphs(self.request, self.device, lowest.level, lowest.chosen),
            warnings=self._warnings(chosen),
        )

    def _modes(self) -> tuple[LayerMode, ...]:
        return tuple(dict.fromkeys(self.request.shape.modes))

    def _policy(self, mode: LayerMode) -> Policy:
        policy = policy_for(self.asked, mode, self.target)
        if policy is None:
            problem = f"Nothing to inherit for the {self.asked.label} on {self.device.name}: no "
            raise self._refusal(problem + "target runs in its process", self._all(""))
        return policy

    def _order(self, mode: LayerMode) -> tuple[str, ...]:
        shape, dtype = self.request.shape, dtype_name(self.request.kv_dtype)
        return order_for(
            self.request.engine,
            self.device,
            shape.kind,
            causal=mode.causal,
            quantised=dtype.startswith(("fp8", "nvfp4")),
            heads=shape.heads,
            head_size=shape.head_size,
        )

    def _judge(self, mode: LayerMode, name: str) -> tuple[Candidate, ...]:
        """The candidates for layers of a mode; a name that stands in no order is one too."""
        names = [known for known in self._order(mode) if known in self.table]
        if name and name not in names:
            if name not in self.table:
                problem = f"Unknown attention backend {name!r} for the {self.asked.label} on "
                problem += f"{self.device.name}, accepted: auto, inherit, {', '.join(self.table)}"
                raise self._refusal(problem, self._all(""))
            names.insert(0, name)
        return tuple(Candidate(known, self._reasons(self.table[known], mode)) for known in names)

    def _reasons(self, backend: Backend, mode: LayerMode) -> tuple[str, ...]:
        reasons = reasons_of(backend, self.request, self.device, mode)
        return (*reasons, *self._binding(backend))

    def _binding(self, backend: Backend) -> tuple[str, ...]:
        """What the target's pages demand: all of the geometry, or only how they are addressed."""
        target, page = self.bound, self.request.page_tokens
        if target is None or page is None:
            return ()
        if self.asked.kv_group is KVGroup.POOLED:
            if page == target.page_tokens:
                return ()
            return (f"KV geometry: {page} against {target.page_tokens} tokens a page",)
        if backend.kv_rule(dtype_name(self.request.kv_dtype), self.device) is None:
            return ()
        own = self._geometry(backend, page)
        differences = own.differences(target)
        if not own.token_bytes:
            differences = ("bytes a token not declared",)
        return (f"KV geometry: {', '.join(differences)} of the target",) if differences else ()

    def _geometry(self, backend: Backend, page: int) -> Geometry:
        rule = backend.kv_rule(dtype_name(self.request.kv_dtype), self.device)
        assert rule is not None, f"{backend.name} was chosen without a KV rule"
        shape = self.request.shape
        dtype = stored_dtype(dtype_name(self.request.kv_dtype), rule, shape.dtype)
        pooled = self.asked.kv_group is KVGroup.POOLED and self.bound is not None
        alignment = self.bound.alignment_bytes if pooled and self.bound is not None else 0
        return geometry_of(shape, dtype, page, alignment)

    def _choose(
        self, policies: dict[LayerMode, Policy], judged: dict[LayerMode, tuple[Candidate, ...]]
    ) -> dict[LayerMode, Backend]:
        """One backend for all modes where one fits all, else the best of each mode."""
        free = not any(policy.name for policy in policies.values())
        if free:
            # The order of non-causal layers goes first: it is the more careful one.
            modes = sorted(judged, key=lambda mode: mode.causal)
            for name in [candidate.name for candidate in judged[modes[0]]]:
                if all(Candidate(name) in candidates for candidates in judged.values()):
                    return dict.fromkeys(judged, self.table[name])
        chosen: dict[LayerMode, Backend] = {}
        for mode, candidates in judged.items():
            name = policies[mode].name
            valid = [c.name for c in candidates if not c.reasons and name in ("", c.name)]
            fitting = [known for known in valid if self._same_kv(self.table[known], chosen)]
            if not fitting:
                problem = policies[mode].problem(self.asked.label, self.device.name)
                if valid:
                    problem += ": its layers would store different KV dtypes"
                raise self._refusal(problem, self._merged(judged))
            chosen[mode] = self.table[fitting[0]]
        return chosen

    def _same_kv(self, backend: Backend, chosen: dict[LayerMode, Backend]) -> bool:
        """All layers of a service share one geometry."""
        return all(
            self._geometry(backend, 1).dtype == self._geometry(other, 1).dtype
            for other in chosen.values()
        )

    def _page_tokens(
        self,
        chosen: dict[LayerMode, Backend],
        judged: dict[LayerMode, tuple[Candidate, ...]],
    ) -> int:
        """The size asked for, or the smallest usual one that all chosen backends take."""
        if self.request.page_tokens is not None:
            return self.request.page_tokens
        for page in PAGE_SIZES:
            if all(backend.takes_page(page, self.device) for backend in chosen.values()):
                return page
        names = " and ".join(dict.fromkeys(backend.name for backend in chosen.values()))
        raise self._refusal(f"No page size that {names} both accept", self._merged(judged))

    def _all(self, name: str) -> tuple[Candidate, ...]:
        return self._merged({mode: self._judge(mode, name) for mode in self._modes()})

    def _merged(self, judged: dict[LayerMode, tuple[Candidate, ...]]) -> tuple[Candidate, ...]:
        return merged(judged, self.request.shape.modes)

    def _warnings(self, chosen: dict[LayerMode, Backend]) -> tuple[str, ...]:
        found = [
            text
            for mode, backend in chosen.items()
            for text in warnings_of(backend, self.request, self.device, mode)
        ]
        return tuple(dict.fromkeys(found))

    def _refusal(self, problem: str, candidates: Sequence[Candidate]) -> AttentionRefused:
        inherited = ""
        if self.target is not None and (self.asked.backend or "").lower() == "inherit":
            inherited = self.target.chosen
        return refuse(self.asked, self.device.name, problem, candidates, inherited)
