import torch, time
a=torch.randn(1024,device="cuda")
el=torch.empty_like; ne=a.new_empty; e=torch.empty; es=torch.empty_strided
f32=torch.float32; dev=a.device
def t(name,f,n=20000):
    for _ in range(1000): f()
    best=1e9
    for _ in range(5):
        s=time.perf_counter()
        for _ in range(n): f()
        best=min(best,(time.perf_counter()-s)/n)
    print(f"{name}: {best*1e6:.3f} us")
def base(): pass
t("call",base)
t("empty_like",lambda: el(a))
t("new_empty",lambda: ne((1024,)))
t("new_empty size arg",lambda: ne(1024))
t("empty dtype device",lambda: e((1024,),dtype=f32,device=dev))
t("empty_strided",lambda: es((1024,),(1,),dtype=f32,device=dev))
t("torch._C._VariableFunctions.empty_like",lambda f=torch._C._VariableFunctions.empty_like: f(a))
import ctypes
