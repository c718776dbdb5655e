"""Helpers that tests share: servers, worlds, builders, proxies."""
