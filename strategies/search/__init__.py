"""Search: from a problem to the best plan, over arrays of candidates."""

from __future__ import annotations

from strategies.search.hetero_auto import sub_grouped
from strategies.search.result import Finalist, SearchResult
from strategies.search.search import search

__all__ = ["Finalist", "SearchResult", "search", "sub_grouped"]
