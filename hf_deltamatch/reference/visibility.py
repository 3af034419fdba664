"""Which query attends to which key, and what follows for the quantiser.

Three sources, all reduced to one object:

* nothing: every query sees every key;
* positions: ``is_causal`` (aligned bottom-right), ``window``, or the compact int32 mask
  ``[B, 3, 1, Tk]`` (rows: key position or −1, window, query offset); query i at position
  ``offset + i`` sees key j iff ``0 <= pos_j <= offset + i`` and ``offset + i − pos_j < window_j``;
* a boolean mask broadcastable to ``[B, Hq, Tq, Tk]`` (True = attend), and-ed with the former.
"""

from __future__ import annotations

import torch
from torch import Tensor

NO_WINDOW = 2**31 - 1


class Visibility:
    """Visibility of ``Tk`` keys to ``Tq`` queries for ``Hkv`` groups of ``G`` query heads.

    Attributes (each ``None`` where it would change nothing):
        key_hidden: ``[B|1, Hkv|1, Tk]``, True for keys that no query sees.
        query_hidden: ``[B|1, Hq|1, Tq]``, True for queries that see no key.
        query_counted: ``[B|1, 1, Tq]``, False for queries of trailing padding (their own key and
            all later ones are hidden). They take no part in the amax of Q, so that the contents of
            padding do not move the descale of real tokens; their own values are clamped to it.
        key_cuts, query_cuts: True where a token must not share a descale with its predecessor:
            boolean masks only, where nobody sees both (another packed segment).
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int, int],
        *,
        is_causal: bool,
        window: int | None,
        mask: Tensor | None,
        device: torch.device,
    ) -> None:
        self.B, self.Hq, self.Hkv, self.Tq, self.Tk = shape
        self.groups = self.Hq // self.Hkv
        self.device = device
        self.position = self.window = self.offset = self.bool_mask = None
        if is_causal or (mask is not None and mask.dtype != torch.bool):
            compact = None if mask is None or mask.dtype == torch.bool else mask
            self._set_positions(window, compact, device)
        if mask is not None and mask.dtype == torch.bool:
            self._set_bool(mask)
        self.key_hidden = self.query_hidden = self.query_counted = None
        self.key_cuts = self.query_cuts = None
        if self.bool_mask is not None:
            self._facts_of_bool()
        elif self.position is not None:
            self._facts_of_positions()

    def _set_positions(self, window: int | None, mask: Tensor | None, device) -> None:
        if mask is None:
            self.position = torch.arange(self.Tk, device=device)[None]
            self.window = torch.full_like(
                self.position, NO_WINDOW if window is None else min(window, NO_WINDOW)
            )
            self.offset = torch.tensor([self.Tk - self.Tq], device=device)
        else:
            rows = mask[:, :, 0].long()
            self.position, self.window = rows[:, 0], rows[:, 1]
            self.offset = rows[:, 2, 0] if self.Tk else rows.new_zeros(rows.shape[0])

    def _set_bool(self, mask: Tensor) -> None:
        mask = mask.view((1,) * (4 - mask.dim()) + tuple(mask.shape))
        mask = mask.expand(*mask.shape[:2], self.Tq, self.Tk)
        if self.position is not None:
            mask = mask & self._from_positions(slice(None), 0, self.Tq)[:, None]
            self.position = None
        self.bool_mask = mask

    def _from_positions(self, b: slice, start: int, stop: int) -> Tensor:
        """``[b|1, rows, Tk]``"""
        b = slice(None) if self.position.shape[0] == 1 else b
        position, window = self.position[b][:, None], self.window[b][:, None]
        query = self.offset[b][:, None] + torch.arange(start, stop, device=position.device)
        query = query[:, :, None]
        return (position >= 0) & (position <= query) & (query - position < window)

    def rows(self, b: slice, h: slice, start: int, stop: int, width: int) -> Tensor | None:
        """Visibility of query rows ``start:stop``: ``[b|1, h|1, G|1, rows, width]``.

        ``width >= Tk`` pads with invisible keys; ``None`` if everything is visible.
        """
        if self.bool_mask is not None:
            m = self.bool_mask
            m = m[b] if m.shape[0] > 1 else m
            m = m[..., start:stop, :]
            if m.shape[1] > 1:
                m = m.unflatten(1, (self.Hkv, self.groups))[:, h]
            else:
                m = m[:, :, None]
        elif self.position is not None:
            m = self._from_positions(b, start, stop)[:, None, None]
        elif width > self.Tk:
            m = torch.ones(1, 1, 1, 1, self.Tk, dtype=torch.bool, device=self.device)
        else:
            return None
        return torch.nn.functional.pad(m, (0, width - self.Tk)) if width > self.Tk else m

    def dense(self) -> Tensor | None:
        """All of it, ``[B|1, Hq|1, Tq, Tk]``; None if everything is visible."""
        if self.bool_mask is not None:
            return self.bool_mask
        return (
            None
            if self.position is None
            else self._from_positions(slice(None), 0, self.Tq)[:, None]
        )

    def _facts_of_positions(self) -> None:
        pos, win, off = self.position, self.window, self.offset[:, None]
        first = torch.maximum(pos, off)
        last = torch.minimum(pos + win - 1, off + self.Tq - 1)
        seen = (pos >= 0) & (first <= last)
        self.key_hidden = (~seen)[:, None]
        query = off + torch.arange(self.Tq, device=pos.device)
        if self.Tk:
            # The newest shown key says how far a position is from its index.
            at = torch.arange(self.Tk, device=pos.device)
            shift = torch.where(pos >= 0, pos - at, -NO_WINDOW).amax(-1, keepdim=True)
            newest = torch.where(pos >= 0, at, -1).amax(-1, keepdim=True)
            own = query - shift
            self.query_counted = ((own <= newest) | (own >= self.Tk))[:, None]
        # Each key shows itself to a run of queries: count where runs begin and end.
        begin, end = (x.clamp(0, self.Tq).expand_as(seen) for x in (pos - off, pos + win - off))
        change = torch.zeros(seen.shape[0], self.Tq + 1, dtype=torch.long, device=pos.device)
        shown = (pos >= 0).expand_as(seen).long()
        change.scatter_add_(-1, begin, shown).scatter_add_(-1, end, -shown)
        self.query_hidden = (change.cumsum(-1)[:, : self.Tq] == 0)[:, None]

    def _facts_of_bool(self) -> None:
        m = self.bool_mask
        per_kv = m.unflatten(1, (self.Hkv, self.groups)).any(2) if m.shape[1] > 1 else m
        self.key_hidden = ~per_kv.any(-2)
        self.query_hidden = ~m.any(-1)
        self.key_cuts = ~_share_with_previous(per_kv, -1)
        self.query_cuts = ~_share_with_previous(m, -2)
        if self.Tq == self.Tk and self.Tq:
            padding = self.key_hidden.any(1, keepdim=True)
            changes = padding ^ padding.roll(1, -1)
            changes[..., 0] = True
            self.query_cuts = self.query_cuts | changes


def _share_with_previous(mask: Tensor, dim: int) -> Tensor:
    """True where index i and i−1 of ``dim`` are visible together somewhere; False at index 0."""
    n = mask.shape[dim]
    other = -1 if dim == -2 else -2
    if n == 0:
        return mask.any(other)
    both = mask.narrow(dim, 1, n - 1) & mask.narrow(dim, 0, n - 1)
    return torch.nn.functional.pad(both.any(other), (1, 0))
