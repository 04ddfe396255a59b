"""Search: from a problem to the best plan, over arrays of candidates."""

from __future__ import annotations

from strategies.search.hetero_auto import sub_grouped
from strategies.search.leave_out import leave_one_out
from strategies.search.result import Finalist, SearchResult
from strategies.search.search import search

__all__ = ["Finalist", "SearchResult", "leave_one_out", "search", "sub_grouped"]
