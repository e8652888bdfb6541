"""Services of every long run: hosts, preemption, clocks, compilations, the workdir."""
