"""Services that every long run needs: hosts, preemption, timing, compilation, the workdir."""
