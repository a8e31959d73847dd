"""Trees of candidate tokens, and the shapes they may take.

Letters: B rows, N nodes, D depth levels, R ranks.

Node 0 is the root: the newest committed token, not yet in the cache. `parent_BN[b, n] == m` says node n continues node m;
the root has -1; parents come before children. A node's depth is its distance from the root.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from headway.heads.common.errors import HeadwayError


@dataclass
class Tree:
    """Candidate tokens of each row; every row has the same number of nodes, each row its own shape."""

    token_BN: Tensor
    parents: list[list[int]]
    depth_BN: Tensor
    ancestor_BNN: Tensor
    """bool: ancestor_BNN[b, n, m] when m is n or an ancestor of n; what node n may attend to."""
    score_BN: Tensor | None = None
    """The head's cumulative log-probability of each node (the root has 0), where the policy ranks by it."""
    size_B: list[int] | None = None
    """Each row's nodes that were proposed; those after them are padding, as wide as the widest row needs. None: all were."""

    @staticmethod
    def from_parents(token_BN: Tensor, parents: list[list[int]]) -> Tree:
        """Return the tree with depths and ancestors worked out from parents (host lists, -1 for the root)."""
        depth, ancestor = [], []
        cached: dict[tuple[int, ...], tuple[list[int], list[list[bool]]]] = {}
        for row in parents:
            key = tuple(row)
            if key not in cached:
                cached[key] = _shape(row)
            depth.append(cached[key][0])
            ancestor.append(cached[key][1])
        device = token_BN.device
        return Tree(token_BN, parents, torch.tensor(depth, device=device), torch.tensor(ancestor, device=device))


def _shape(parents: list[int]) -> tuple[list[int], list[list[bool]]]:
    depth: list[int] = []
    ancestor: list[list[bool]] = []
    for n, p in enumerate(parents):
        depth.append(0 if p < 0 else depth[p] + 1)
        row = list(ancestor[p]) if p >= 0 else [False] * len(parents)
        row[n] = True
        ancestor.append(row)
    return depth, ancestor


@dataclass(frozen=True)
class StaticTree:
    """A fixed shape: each path is a tuple of ranks, (r1, r2) being the r2-th best child of the r1-th best child."""

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        known = {()} | set(self.paths)
        for path in self.paths:
            if any(rank < 0 for rank in path):
                raise HeadwayError(f"tree path {path} has a negative rank; ranks count from 0, the best child")
            if not path or path[:-1] not in known:
                raise HeadwayError(
                    f"tree path {path} has no parent {path[:-1]} in the tree; list every prefix of a path"
                )
        object.__setattr__(self, "paths", tuple(sorted(set(self.paths), key=lambda p: (len(p), p))))

    @property
    def depth(self) -> int:
        """Longest path."""
        return max((len(p) for p in self.paths), default=0)

    @property
    def nodes(self) -> int:
        """Nodes of the tree, root included."""
        return len(self.paths) + 1

    @property
    def is_chain(self) -> bool:
        """Whether no node has two children."""
        return all(not any(p) for p in self.paths)

    def describe(self) -> str:
        """Return the short text that `parse_policy` takes."""
        if not self.paths:
            return "off"
        if self.is_chain:
            return f"chain:{self.depth}"
        return "static:" + "/".join(".".join(map(str, path)) for path in self.paths)


@dataclass(frozen=True)
class DynamicTree:
    """A shape chosen each round by the head's own probabilities (EAGLE-2, section 4).

    Each of `depth` levels expands the `top_k` most probable nodes into `top_k` children each; of all candidates the
    `nodes` - 1 of highest cumulative probability are verified, with the root.
    """

    depth: int = 4
    top_k: int = 4
    nodes: int = 12

    def __post_init__(self) -> None:
        if self.depth < 1 or self.top_k < 1 or self.nodes < 2:
            raise HeadwayError(
                f"dynamic tree needs depth >= 1, top_k >= 1, nodes >= 2; got depth={self.depth}, top_k={self.top_k}, "
                f"nodes={self.nodes}"
            )

    @property
    def is_chain(self) -> bool:
        """Whether no node can have two children."""
        return self.top_k == 1

    def describe(self) -> str:
        """Return the short text that `parse_policy` takes."""
        return f"dynamic:depth={self.depth},top_k={self.top_k},nodes={self.nodes}"


Shape = StaticTree | DynamicTree
OFF = StaticTree(())
"""No draft: every round commits one token."""


@dataclass(frozen=True)
class ByRows:
    """A shape for each number of rows that are decoded together: the more rows, the dearer every node.

    `shapes` holds (rows, shape); a shape is for that many rows and fewer, down to the entry before it; the last also for more.
    """

    shapes: tuple[tuple[int, Shape], ...]

    def __post_init__(self) -> None:
        rows = [count for count, _ in self.shapes]
        if not rows or rows[0] < 1 or rows != sorted(set(rows)):
            raise HeadwayError(f"trees by rows need ascending numbers of rows from 1 on, each once; got {rows}")

    def of(self, rows: int) -> Shape:
        """Return the shape for that many rows."""
        return at_least(dict(self.shapes), rows)

    @property
    def depth(self) -> int:
        """Of the deepest."""
        return max(shape.depth for _, shape in self.shapes)

    @property
    def nodes(self) -> int:
        """Of the largest."""
        return max(shape.nodes for _, shape in self.shapes)

    @property
    def is_chain(self) -> bool:
        """Whether all are chains."""
        return all(shape.is_chain for _, shape in self.shapes)

    def describe(self) -> str:
        """Return the short text that `parse_policy` takes."""
        return " ".join(f"{rows}={shape.describe()}" for rows, shape in self.shapes)


Policy = Shape | ByRows
Priced = TypeVar("Priced")


def at_least(table: Mapping[int, Priced], rows: int) -> Priced:
    """Return the entry of the least number of rows that is not below `rows`, or of the largest there is."""
    return table[min((count for count in table if count >= rows), default=max(table))]


def each_shape(policy: Policy, change: Callable[[Shape], Shape]) -> Policy:
    """Return the policy with every shape changed; one for all rows where they are then alike."""
    if not isinstance(policy, ByRows):
        return change(policy)
    shapes = tuple((rows, change(shape)) for rows, shape in policy.shapes)
    return shapes[0][1] if len({shape for _, shape in shapes}) == 1 else ByRows(shapes)


def chain(depth: int) -> StaticTree:
    """Return the tree that is one path of `depth` best guesses."""
    if depth < 0:
        raise HeadwayError(f"a chain needs depth >= 0, got {depth}")
    return StaticTree(tuple((0,) * d for d in range(1, depth + 1)))


def static_from_hits(hits_DR: Tensor, nodes: int) -> StaticTree:
    """Return the static tree of `nodes` nodes (root included) of greatest expected accepted length.

    hits_DR[d, r] is the share of rounds in which, the path being right so far, the token at depth d + 1 was the head's
    choice of rank r. A node's gain is the product along its path; gains fall along every path, so taking the best
    available node each time is optimal.
    """
    import heapq

    D, R = hits_DR.shape
    share = hits_DR.tolist()
    heap: list[tuple[float, tuple[int, ...]]] = [(-share[0][r], (r,)) for r in range(R)] if D else []
    heapq.heapify(heap)
    paths: list[tuple[int, ...]] = []
    while heap and len(paths) < nodes - 1:
        gain, path = heapq.heappop(heap)
        if gain >= 0:
            break
        paths.append(path)
        if len(path) < D:
            for r in range(R):
                heapq.heappush(heap, (gain * share[len(path)][r], (*path, r)))
    return StaticTree(tuple(paths))


@dataclass
class Template:
    """A static tree laid out for drafting: per level, which node of the level above is expanded and which rank is taken."""

    frontier: list[list[int]] = field(default_factory=list)
    """frontier[d]: indices, among the nodes of depth d, of those that have children."""
    parent: list[list[int]] = field(default_factory=list)
    """parent[d]: for each node of depth d + 1, the index of its parent in frontier[d]."""
    rank: list[list[int]] = field(default_factory=list)
    """rank[d]: for each node of depth d + 1, its rank among its parent's children."""
    parents: list[int] = field(default_factory=list)
    """Parent of every node in the whole tree, root first."""


def template(tree: StaticTree) -> Template:
    """Return the layout of a static tree."""
    out = Template(parents=[-1])
    index: dict[tuple[int, ...], int] = {(): 0}
    above: list[tuple[int, ...]] = [()]
    for d in range(tree.depth):
        level = [p for p in tree.paths if len(p) == d + 1]
        expanded = sorted({p[:-1] for p in level}, key=above.index)
        out.frontier.append([above.index(p) for p in expanded])
        out.parent.append([expanded.index(p[:-1]) for p in level])
        out.rank.append([p[-1] for p in level])
        for p in level:
            out.parents.append(index[p[:-1]])
            index[p] = len(index)
        above = level
    return out


def check_policy(policy: Policy, max_depth: int | None) -> None:
    """Raise HeadwayError when the tree is deeper than the head can draft."""
    if max_depth is not None and policy.depth > max_depth:
        raise HeadwayError(
            f"the tree has depth {policy.depth}, the head drafts {max_depth} tokens; use depth <= {max_depth} "
            f"(--tree chain:{max_depth}) or a head with more draft steps"
        )


def parse_policy(text: str) -> Policy:
    """Return the policy that a text names: `off`, `chain:4`, `dynamic:depth=4,top_k=4,nodes=12`, `static:0/1/0.0/0.1`, or
    several by rows, `1=chain:4 4=chain:1 8=off`.

    In `static`, paths are separated by `/` and ranks by `.`. Raises HeadwayError for anything else.
    """
    words = text.split()
    numbered = [(rows, shape) for rows, _, shape in (word.partition("=") for word in words) if rows.isdigit()]
    if words and len(numbered) == len(words):
        return ByRows(tuple((int(rows), _parse_shape(shape)) for rows, shape in numbered))
    return _parse_shape(text)


def _parse_shape(text: str) -> Shape:
    kind, _, rest = text.strip().partition(":")
    try:
        if kind == "off" and not rest:
            return OFF
        if kind == "chain":
            return chain(int(rest))
        if kind == "static":
            return StaticTree(tuple(tuple(int(r) for r in p.split(".")) for p in rest.split("/")))
        if kind == "dynamic":
            fields = dict(pair.split("=") for pair in rest.split(",")) if rest else {}
            return DynamicTree(**{k: int(v) for k, v in fields.items()})
    except HeadwayError:
        raise
    except (ValueError, TypeError) as e:
        raise HeadwayError(f"cannot read tree {text!r} ({e}); {_TREES}") from e
    raise HeadwayError(f"unknown tree {text!r}; {_TREES}")


_TREES = (
    "use off, chain:4, dynamic:depth=4,top_k=4,nodes=12 or static:0/1/0.0 (paths of ranks), or a tree for each number of rows, "
    "'1=chain:4 4=chain:1 8=off'"
)
