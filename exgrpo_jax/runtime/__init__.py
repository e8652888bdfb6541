"""What every long run needs: hosts, preemption, clocks, compilations, the workdir."""
