"""The broker as a process: event loop, threads, sockets. asyncio and threads are used here and nowhere else."""
