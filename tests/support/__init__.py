"""What tests share: servers, worlds, builders, proxies."""
